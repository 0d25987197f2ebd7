// Rows of one matrix as planes (split_rows.cuh), or of two (x and W) with as many columns, by one launch.
#include "common/dependent.cuh"
#include "fp32/split_rows.cuh"

// Two matrices one below the other: the rows [0, first_rows) of the first and, from second_begin on,
// those of the second; between them lies nothing.
struct Rows {
  const float *first, *second;
  i64 first_stride, second_stride;
  int first_rows, second_begin, end;

  __device__ __forceinline__ bool has(int row) const {
    return row < first_rows || (row >= second_begin && row < end);
  }
  __device__ __forceinline__ const float* at(int row) const {
    return row < first_rows ? first + row * first_stride
                            : second + (row - second_begin) * second_stride;
  }
};

// first: (first_rows, k), rows first_stride apart; second: (rows - second_begin, k). hi, lo: (rows,
// k_padded), the padding of zeros; k_padded is a multiple of 4. scale, flag, columns: (rows,).
extern "C" __global__ void __launch_bounds__(kThreads)
    split(const float* first, i64 first_stride, const float* second, i64 second_stride, u16* hi,
          u16* lo, float* scale, Flag* flag, ColumnList* columns, int first_rows, int second_begin,
          int rows, int k, int k_padded) {
  wait_for_previous_kernel();
  const Rows all = {first, second, first_stride, second_stride, first_rows, second_begin, rows};
  const int row = blockIdx.x * kTeams + threadIdx.x / kRowThreads;
  split_row(all.has(row) ? all.at(row) : nullptr, row, k, {hi, lo, scale, flag, columns, k_padded});
}
