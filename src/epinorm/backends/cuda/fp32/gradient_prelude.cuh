// What of dz becomes planes, and how, as fp32/gradient_planes.py and norm_planes_text.py write it; see text/source.py.
#pragma once

constexpr bool kByRow = true, kByColumn = true, kBesideDx = false;
constexpr int kSums = 1;
#define SUM_PARAMETERS , float* sum0
#define SUM_STORES case 0: sum0[column] = sum; break;
