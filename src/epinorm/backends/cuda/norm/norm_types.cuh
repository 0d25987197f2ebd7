// The types of one norm, given by the prelude: Z of the linear's output, P of the norm's parameters and
// operands, Y of the output, S of the sum (what enters the norm) where forward writes it, and of what
// backward reads: z, or the sum in its place. T is what all is computed in.
#pragma once
#include "norm/prelude.cuh"
#include "common/numeric.cuh"

using i64 = long long;
using Z = EPINORM_Z;
using P = EPINORM_P;
using Y = EPINORM_Y;
using S = EPINORM_S;
using T = EPINORM_T;
