// The CUDA runtime as far as launches of exported files ask it, on the CPU: a launch calls a function.
#pragma once
#include <cstddef>
#include <cstring>

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct int4 {
  int x, y, z, w;
};
typedef void* cudaStream_t;
typedef int cudaError_t;
constexpr cudaError_t cudaSuccess = 0;
enum {
  cudaFuncAttributeMaxDynamicSharedMemorySize,
  cudaDevAttrMultiProcessorCount,
  cudaLaunchAttributeProgrammaticStreamSerialization,
  cudaLaunchAttributeClusterDimension,
  cudaEnableDefault
};
struct cudaLaunchAttribute {
  int id;
  struct {
    int programmaticStreamSerializationAllowed;
    struct {
      unsigned x, y, z;
    } clusterDim;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  int numAttrs;
};

static cudaLaunchConfig_t launched;  // whose kernel runs
static int allowed_shared_bytes;     // of the kernel that was last asked for

inline const char* cudaGetErrorString(cudaError_t) { return "a CUDA error"; }
inline cudaError_t cudaGetDevice(int* device) { return *device = 0; }
inline cudaError_t cudaDeviceGetAttribute(int* value, int, int) {
  *value = 4;
  return cudaSuccess;
}
template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel*, int, int bytes) {
  allowed_shared_bytes = bytes;
  return cudaSuccess;
}
template <class... Parameters, class... Values>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Values&&... values) {
  launched = *config;
  kernel(static_cast<Parameters>(values)...);
  return cudaSuccess;
}
