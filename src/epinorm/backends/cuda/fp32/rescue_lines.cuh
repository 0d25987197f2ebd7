// An operand's tiles on their way from global memory to the ring of `rescue_product.cuh`, where they
// always stand as lines along K, kPitch apart.
//
// Copied by cp.async, which takes no registers. An operand whose memory runs along K travels in 16
// bytes at once where its alignment allows it (kAligned) and in words where not; one whose memory
// runs across K, in words: so the products are the same for each.
#pragma once
#include "common/async_copy.cuh"
#include "fp32/rescue_items.cuh"

constexpr int kPitch = kBlockK + 4;  // floats: eight rows of a column of float4 fill all banks
constexpr int kVector = 4;           // values of K that a lane reads at a time

// cp.async (PTX, sm_80) of `bytes` of 16, and zeros for the rest.
EPINORM_FUNCTION void copy_vector(u32 target, const float* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(from), "r"(bytes)
               : "memory");
}
EPINORM_FUNCTION void copy_word(u32 target, const float* from, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(target), "l"(from), "r"(bytes)
               : "memory");
}

// kLines lines of one operand. kAcross: neighbours in memory are of neighbouring lines, not of one.
template <int kLines, bool kAcross>
struct Lines;

// A thread copies four values of a line.
template <int kLines>
struct Lines<kLines, false> {
  static constexpr int kVectors = kBlockK / kVector;  // of a row
  static constexpr int kStep = kThreads / kVectors;
  static constexpr int kParts = (kLines + kStep - 1) / kStep;
  const float* from[kParts];

  // start(i): where line i begins.
  template <class Start>
  EPINORM_FUNCTION Lines(Start start, i64) {
#pragma unroll
    for (int part = 0; part < kParts; ++part)
      from[part] = start(min(part * kStep + int(threadIdx.x) / kVectors, kLines - 1)) +
                   threadIdx.x % kVectors * kVector;
  }
  EPINORM_FUNCTION void copy(u32 target, int first_k, int k) const {
    const int line = threadIdx.x / kVectors, column = threadIdx.x % kVectors * kVector;
    const int left = k - first_k - column;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      if (kLines % kStep != 0 && part * kStep + line >= kLines) break;
      const u32 to = target + ((part * kStep + line) * kPitch + column) * 4;
      if (kAligned) {
        copy_vector(to, from[part] + first_k, min(max(left, 0), kVector) * 4);
      } else {
#pragma unroll
        for (int i = 0; i < kVector; ++i)
          copy_word(to + i * 4, from[part] + first_k + i, i < left ? 4 : 0);
      }
    }
  }
};

// A warp copies eight lines by four values of K: whole sectors of global memory, and no two words to
// one bank, since lines are kPitch apart.
template <int kLines>
struct Lines<kLines, true> {
  static constexpr int kParts = (kLines / 8 + kWarps - 1) / kWarps;
  static_assert(kLines % 8 == 0 && kPitch % 32 == 4, "");
  const float* from[kParts];
  i64 stride;  // between values of K

  template <class Start>
  EPINORM_FUNCTION Lines(Start start, i64 stride) : stride(stride) {
#pragma unroll
    for (int part = 0; part < kParts; ++part)
      from[part] = start(min(line(part), kLines - 1)) + threadIdx.x % 32 / 8 * stride;
  }
  EPINORM_FUNCTION static int line(int part) {
    return (part * kWarps + int(threadIdx.x) / 32) * 8 + threadIdx.x % 8;
  }
  EPINORM_FUNCTION void copy(u32 target, int first_k, int k) const {
    const int place = threadIdx.x % 32 / 8;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      if (kLines % (8 * kWarps) != 0 && line(part) >= kLines) break;
      const u32 to = target + (line(part) * kPitch + place) * 4;
      const float* value = from[part] + first_k * stride;
#pragma unroll
      for (int i = 0; i < kBlockK; i += kVector, value += kVector * stride)
        copy_word(to + i * 4, value, first_k + place + i < k ? 4 : 0);
    }
  }
};
