// z, and of each column mean and rstd -> y = post(norm(pre(z + bias))). One read of z, one write of y,
// which may be written over z (executable.py): each thread reads its part before it writes there. From
// the first row, which batch_statistics read last; with kFromLast from the last one, which the product
// wrote last, where it left the statistics too.
#include "common/dependent.cuh"
#include "norm/batch_layout.cuh"

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocksPerSm)
batch_forward(const Z* z, i64 z_stride, const Z* __restrict__ bias, const P* __restrict__ gamma,
              const P* __restrict__ beta, Y* y, const T* __restrict__ mean, const T* __restrict__ rstd,
              i64 rows, int groups EPINORM_CHAIN_PARAMETERS) {
  wait_for_previous_kernel();
  const Sources from = {bias, gamma, beta, EPINORM_OPERAND_POINTERS, EPINORM_OPERAND_STRIDES,
                        EPINORM_CONSTANTS,
                        chain::drops_of<T>(EPINORM_CONSTANTS, EPINORM_OPERAND_POINTERS)};
  const Strip at(groups);
  if (!at.inside(0)) return;
  const ChannelStore store(from, at);
  const Vector<T, kVector> means = loaded<T, kVector>(mean + at.first);
  const Vector<T, kVector> scales = loaded<T, kVector>(rstd + at.first);
  for (i64 first = at.begin(); first < rows; first += at.step()) {
    const auto row = [&](int u) {
      const i64 at = first + u * kWarpsY;
      return kFromLast ? rows - 1 - at : at;
    };
    const Rows read(at, z, z_stride, from, rows, row);
    const Channels channels = store.get(from, at, 0);
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
      T out[kVector];
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        T t[chain::kSlots];
        operands_at(from, channels, read.elements[u], j, t);
        const T distance = read.value(from, channels, u, j) - means.value[j];
        const T normalized = channels.affine(distance * scales.value[j], j);
        out[j] = chain::post_apply<T>(from.constants, normalized, t);
      }
      if (row(u) < 0 || row(u) >= rows) continue;
      Vector<Y, kVector> packed;
      packed.set(out);
      packed.store(y + row(u) * at.columns + at.first);
    }
  }
}
