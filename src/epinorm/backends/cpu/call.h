// The plain-C facts that Python, the runner and a chain's kernel pass to each other. Python reads
// the fields of these structs here (abi.py).
#pragma once
#include <cstdint>

#define EPINORM_EXPORT extern "C" __attribute__((visibility("default")))

extern "C" {

// What every row of one call shares. Pointers may be null where the call has no such tensor.
struct EpinormCall {
  int64_t n;
  int64_t groups;
  double eps;
  const double* constants;  // the chain's, in its order
  const void* norm_weight;  // (N,)
  const void* norm_bias;    // (N,)
  const void* const* operands;      // the chain's tensors, (N,), (M, N) or (M, 1) each
  const int64_t* operand_strides;   // elements between the rows of those with M rows
  void* const* operand_gradients;   // dense (M, N) or null; backward only
  void* mean;  // (M, groups) or null: written forward, read backward
  void* rstd;
  void* sum;          // dense (M, N): what enters the norm, if it is a result; written forward
  const void* dsum;   // its gradient (M, N), or null; read backward
  int64_t dsum_stride;
  mutable int32_t overflow;  // set where a square is about to overflow: PyTorch is asked then
};

// Rows [first, first + rows) of z -> y. `scratch` holds epinorm_scratch_bytes(n, groups).
typedef void (*EpinormForward)(const EpinormCall*, int64_t first, int64_t rows, const void* z,
                               int64_t z_stride, void* y, int64_t y_stride, void* scratch);

// Rows [first, first + rows): z, or the sum if it is kept instead, and dy -> dz, adding each column's sums, lane by lane, to `sums`.
typedef void (*EpinormBackward)(const EpinormCall*, int64_t first, int64_t rows, const void* z,
                                int64_t z_stride, const void* dy, int64_t dy_stride, void* dz,
                                int64_t dz_stride, void* sums, void* scratch);

// Adds the lanes of `sums` to totals (count, N) and clears them: dbias, dgamma, dbeta, then channel
// operands.
typedef void (*EpinormFold)(const EpinormCall*, void* sums, double* totals);

struct EpinormKernel {
  EpinormForward forward;
  EpinormBackward backward;
  EpinormFold fold;
  int64_t scratch_bytes;
  int64_t sums_bytes;
  int64_t totals;  // rows of the totals that `fold` writes
};

// How the rows are cut. It depends on the shape alone, so results do not depend on the threads.
struct EpinormBlocks {
  int64_t rows;     // rows of a block
  int64_t columns;  // columns of the product's tile: N where a block goes from x to y in one step
  int64_t inner;    // columns of K in a tile of the gradients' products
  int64_t outer;    // rows of the weight in such a tile
  int64_t chunks;   // parts of the rows that each keep their own column sums
  int64_t dx_rows;  // rows of a tile of dx; 0: a block's dx is computed with its dz
  int64_t packed;   // nonzero: arrange the weight once for the products of all blocks
};
}
