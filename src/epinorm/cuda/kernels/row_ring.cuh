// The rows that a block is about to work on, on their way into shared memory: kStages of them,
// which keeps enough bytes in flight without registers. A thread copies what it will read itself,
// so nobody waits for another.
//
// The prelude gives kStages; kStreams, z, dy and the element operands; element_stream(i), the place
// of operand i among them.
#pragma once
#include "norm_rows.cuh"
#include "shared_units.cuh"

// cp.async; only 16 bytes can pass L1 by, where nobody reads them again.
template <int kBytes>
EPINORM_FUNCTION void copy_async(u32 to, const void* from) {
  if constexpr (kBytes == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(kBytes)
                 : "memory");
}
// cp.async.commit_group, cp.async.wait_group
EPINORM_FUNCTION void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
EPINORM_FUNCTION void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

static_assert(sizeof(Z) == 4 && sizeof(Y) == 4 && sizeof(P) == 4 && sizeof(T) == 4, "fp32");
static_assert(kRows == 1 && kVector <= 4, "a copy is a vector of a row");

struct RowRing {
  struct Stage {
    float stream[kStreams][kVectors][kThreads * kVector];
    float mean[kThreads], rstd[kThreads], factor[kThreads];
  };
  Stage* stages;
  // Where this thread's next row lies; a block's rows are evenly apart.
  const float *stream[kStreams], *mean, *rstd, *factor;
  i64 step[kStreams], group_step;
  int rows_left;

  EPINORM_FUNCTION RowRing(Stage* stages, const Columns& here, const Tensors& tensors)
      : stages(stages) {
    const i64 row = blockIdx.y, group = row * tensors.groups + here.group;
    mean = tensors.mean + group;
    rstd = tensors.rstd + group;
    factor = tensors.largest.row_factor + row;
    group_step = i64(gridDim.y) * tensors.groups;
    rows_left = here.live ? (tensors.rows - row + gridDim.y - 1) / gridDim.y : 0;
    const auto begin = [&](int i, const float* from, i64 stride) {
      stream[i] = from + row * stride + here.column(0);
      step[i] = gridDim.y * stride;
    };
    begin(0, tensors.z, tensors.z_stride);
    begin(1, tensors.dy, tensors.dy_stride);
#pragma unroll
    for (int i = 0; i < chain::kOperands; ++i)
      if (!chain::is_channel(i))
        begin(element_stream(i), tensors.from.operand[i], tensors.from.stride[i]);
  }

  // The next row into a stage that is no longer read. Beyond the last row it is an empty copy.
  EPINORM_FUNCTION void fill(int stage, const Columns& here) {
    Stage& to = stages[stage];
    const int thread = threadIdx.x;
    if (rows_left > 0) {
      if (chain::kCentred) copy_async<4>(shared_address(to.mean + thread), mean);
      copy_async<4>(shared_address(to.rstd + thread), rstd);
      copy_async<4>(shared_address(to.factor + thread), factor);
#pragma unroll
      for (int i = 0; i < kStreams; ++i)
#pragma unroll
        for (int e = 0; e < kVectors; ++e)
          if (here.inside(e))
            copy_async<4 * kVector>(shared_address(to.stream[i][e] + thread * kVector),
                                    stream[i] + (here.column(e) - here.column(0)));
    }
    commit_copies();
    mean += group_step;
    rstd += group_step;
    factor += gridDim.y;
#pragma unroll
    for (int i = 0; i < kStreams; ++i) stream[i] += step[i];
    --rows_left;
  }

  // The oldest stage's row, complete; factor: x's scale of it.
  EPINORM_FUNCTION Pass take(int stage, const Columns& here, float& factor) const {
    wait_for_copies<kStages - 1>();
    const Stage& from = stages[stage];
    const int thread = threadIdx.x;
    Pass pass;
    pass.mean[0] = here.live && chain::kCentred ? from.mean[thread] : 0.0f;
    pass.rstd[0] = here.live ? from.rstd[thread] : 0.0f;
    factor = here.live ? from.factor[thread] : 0.0f;
#pragma unroll
    for (int e = 0; e < kVectors; ++e) {
      if (!here.inside(e)) continue;
      pass.z[0][e] = vector(from.stream[0][e]);
      pass.dy[0][e] = vector(from.stream[1][e]);
#pragma unroll
      for (int i = 0; i < chain::kOperands; ++i)
        if (!chain::is_channel(i))
          pass.elements[0][e].operand[i] = vector(from.stream[element_stream(i)][e]);
    }
    return pass;
  }

 private:
  EPINORM_FUNCTION static Vector<float, kVector> vector(const float* shared) {
    using Unit = typename Vector<float, kVector>::Unit;
    Vector<float, kVector> loaded;
    loaded.unit[0] = reinterpret_cast<const Unit*>(shared)[threadIdx.x];
    return loaded;
  }
};
