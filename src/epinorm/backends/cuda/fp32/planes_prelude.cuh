// One instance of what makes and reads planes, as fp32/planes.py writes it; see text/source.py.
#pragma once

constexpr int kPlanes = 1;
constexpr int kRowThreads = 64, kRowVectors = 4;
constexpr bool kAligned = true, kPlain = true, kOrdered = false, kSamples = true;
constexpr float kTolerance = 0x1p-20f;
