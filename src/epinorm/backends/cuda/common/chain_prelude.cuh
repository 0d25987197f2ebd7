// One chain as text/chain_text.py writes it, for a header that uses it, read alone; see text/source.py.
#pragma once
#include "common/chain.cuh"

namespace chain {
constexpr bool kLayerNorm = false;
#include "common/chain_functions.cuh"

template <typename T>
__device__ T gated(T a, T x);
template <typename T>
__device__ T normal_cdf(T x);
template <typename T>
__device__ T normal_pdf(T x);
template <typename T>
__device__ T tanh_cdf(T x);
template <typename T>
__device__ T tanh_pdf(T x);
#include "common/chain_short.cuh"
#include "common/chain_rounded.cuh"

struct alignas(8) Seed {
  unsigned key, first_row;
};
struct RandomPair {
  unsigned even, odd;
};
__device__ RandomPair random_words(Seed seed, long long row, long long pair);
__device__ unsigned last_kept(float keep);
template <typename T>
__device__ T scale_of_kept(T keep);

constexpr bool kNormalises = true, kCentred = true, kRounds = false;
template <typename T>
EPINORM_FUNCTION constexpr T epsilon() { return T(1e-5); }
template <typename T>
struct Constants {
  T of[1];
};
constexpr int kOperands = 0, kPreOperands = 0, kSlots = 1;
EPINORM_FUNCTION constexpr bool is_channel(int i) { return false; }
EPINORM_FUNCTION constexpr bool is_element(int i) { return false; }
EPINORM_FUNCTION constexpr bool is_row(int i) { return false; }
EPINORM_FUNCTION constexpr int keep_of(int i) { return 0; }
#include "common/chain_drops.cuh"

template <typename T>
__device__ T pre_apply(Constants<T> c, T x, const T (&t)[kSlots]);
template <typename T>
__device__ void pre_apply(Constants<T> c, T (&x)[2], const T (&t)[2][kSlots]);
template <typename T>
__device__ T pre_backward(Constants<T> c, T g, T x0, const T (&t)[kSlots], T (&dt)[kSlots]);
template <typename T>
__device__ T post_apply(Constants<T> c, T x, const T (&t)[kSlots]);
template <typename T>
__device__ void post_apply(Constants<T> c, T (&x)[2], const T (&t)[2][kSlots]);
template <typename T>
__device__ T post_backward(Constants<T> c, T g, T x0, const T (&t)[kSlots], T (&dt)[kSlots]);
}  // namespace chain
