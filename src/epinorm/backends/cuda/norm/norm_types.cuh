// The types of one norm, given by the prelude: Z of the linear's output, P of the norm's parameters and
// operands, Y of the output, T that all is computed in.
#pragma once
#include "common/numeric.cuh"

using i64 = long long;
using Z = EPINORM_Z;
using P = EPINORM_P;
using Y = EPINORM_Y;
using T = EPINORM_T;
