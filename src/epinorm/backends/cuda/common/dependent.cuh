// Programmatic dependent launch (PTX griddepcontrol, sm_90): the next kernel of the stream is started
// while this one ends. What it reads is complete once it has waited.
#pragma once
#include "common/chain.cuh"

EPINORM_FUNCTION void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

EPINORM_FUNCTION void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
