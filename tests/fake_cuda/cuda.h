// Tensor maps that say what they were made of.
#pragma once
#include <cstdint>
#include <cstring>

typedef uint32_t cuuint32_t;
typedef uint64_t cuuint64_t;
enum CUresult { CUDA_SUCCESS };
enum CUtensorMapDataType { CU_TENSOR_MAP_DATA_TYPE_FLOAT16, CU_TENSOR_MAP_DATA_TYPE_FLOAT32 };
enum CUtensorMapInterleave { CU_TENSOR_MAP_INTERLEAVE_NONE };
enum CUtensorMapSwizzle { CU_TENSOR_MAP_SWIZZLE_128B };
enum CUtensorMapL2promotion { CU_TENSOR_MAP_L2_PROMOTION_L2_256B };
enum CUtensorMapFloatOOBfill { CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE };
typedef int cudaDriverEntryPointQueryResult;

struct CUtensorMap {
  const void* address;
  uint64_t columns, rows, stride_bytes;
  CUtensorMapDataType type;
  uint32_t box_columns, box_rows;
  unsigned char rest[84];
};

inline CUresult encode(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t, void* address,
                       const cuuint64_t* shape, const cuuint64_t* strides, const cuuint32_t* box,
                       const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                       CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  *map = {address, shape[0], shape[1], strides[0], type, box[0], box[1], {}};
  return CUDA_SUCCESS;
}
inline int cudaGetDriverEntryPoint(const char*, void** function, int,
                                   cudaDriverEntryPointQueryResult*) {
  *function = reinterpret_cast<void*>(&encode);
  return 0;
}
