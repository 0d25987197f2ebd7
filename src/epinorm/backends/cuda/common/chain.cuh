// What the generated text of a chain stands on: see text/chain_text.py. C++ function templates over T (float
// or double); exp, expm1, log1p, tanh and erf are CUDA's own, overloaded on T, at full accuracy.
#ifndef EPINORM_CHAIN_CUH
#define EPINORM_CHAIN_CUH

#define EPINORM_FUNCTION __device__ __forceinline__
#define EPINORM_INFINITY (__longlong_as_double(0x7ff0000000000000LL))

// x rounded to a type by the name that vector.cuh has for it.
#define EPINORM_ROUNDED(type, x) EPINORM_ROUNDED_TO(type, x)
#define EPINORM_ROUNDED_TO(type, x) rounded_##type(x)

#endif
