// The rows that a block is about to work on, on their way into shared memory: kStages of them,
// which keeps enough bytes in flight without registers. A thread copies what it will read itself,
// so none waits for another.
//
// The prelude gives kStages; kStreams, z, dy and the element operands; element_stream(i), the place
// of operand i among them, 0 for one that is not.
#pragma once
#include "common/async_copy.cuh"
#include "norm/norm_rows.cuh"
#include "common/shared_units.cuh"

// cp.async; only 16 bytes can pass L1 by, where nothing reads them again.
template <int kBytes>
EPINORM_FUNCTION void copy_async(u32 to, const void* from) {
  if constexpr (kBytes == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(kBytes)
                 : "memory");
}

static_assert(sizeof(Z) == 4 && sizeof(Y) == 4 && sizeof(P) == 4 && sizeof(T) == 4, "fp32");
static_assert(kRows == 1 && kVector <= 4, "a copy is a vector of a row");

struct RowRing {
  struct Stage {
    float stream[kStreams][kVectors][kThreads * kVector];
  };
  Stage* stages;
  const float* next[kStreams];  // this thread's first column of the row that is copied next
  i64 step[kStreams];           // to the one after it
  int rows_left;

  // Fills every stage: with row 0 first, then with the block's own rows, which are evenly apart.
  EPINORM_FUNCTION RowRing(Stage* stages, const Columns& here, const Tensors& tensors)
      : stages(stages), rows_left(here.live ? 1 : 0) {
    i64 first[kStreams];
    const auto begin = [&](int i, const float* from, i64 stride) {
      next[i] = from + here.column(0);
      first[i] = blockIdx.y * stride;
      step[i] = gridDim.y * stride;
    };
    begin(0, tensors.z, tensors.z_stride);
    begin(1, tensors.dy, tensors.dy_stride);
#pragma unroll
    for (int i = 0; i < chain::kOperands; ++i)
      if (element_stream(i) > 0)
        begin(element_stream(i), tensors.from.operand[i], tensors.from.stride[i]);
    fill(0, here);
#pragma unroll
    for (int i = 0; i < kStreams; ++i) next[i] += first[i] - step[i];
    const int rows = static_cast<int>(tensors.rows) - blockIdx.y;
    rows_left = here.live ? (rows + gridDim.y - 1) / gridDim.y : 0;
#pragma unroll
    for (int stage = 1; stage < kStages; ++stage) fill(stage, here);
  }

  // The next row into a stage that is no longer read. Beyond the last row it is an empty copy.
  EPINORM_FUNCTION void fill(int stage, const Columns& here) {
    Stage& to = stages[stage];
    if (rows_left > 0)
#pragma unroll
      for (int i = 0; i < kStreams; ++i)
#pragma unroll
        for (int e = 0; e < kVectors; ++e)
          if (here.inside(e))
            copy_async<4 * kVector>(shared_address(to.stream[i][e] + threadIdx.x * kVector),
                                    next[i] + (here.column(e) - here.column(0)));
    commit_copies();
#pragma unroll
    for (int i = 0; i < kStreams; ++i) next[i] += step[i];
    --rows_left;
  }

  // The oldest stage's row, complete.
  EPINORM_FUNCTION Pass take(int stage, const Columns& here, const Sources& sources, int row,
                             float mean, float rstd) const {
    wait_for_copies<kStages - 1>();
    const Stage& from = stages[stage];
    Pass pass;
    pass.mean[0] = mean;
    pass.rstd[0] = rstd;
#pragma unroll
    for (int e = 0; e < kVectors; ++e) {
      if (!here.inside(e)) continue;
      pass.z[0][e] = vector(from.stream[0][e]);
      pass.dy[0][e] = vector(from.stream[1][e]);
#pragma unroll
      for (int i = 0; i < chain::kOperands; ++i)
        if (element_stream(i) > 0)
          pass.elements[0][e].operand[i] = vector(from.stream[element_stream(i)][e]);
      pass.elements[0][e].draw(sources, row, here.column(e));
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
