"""Kernels for NVIDIA GPUs and what compiles, keeps and launches them.

Nothing here touches CUDA or imports cuda-core when it is imported: every module does so when it is
first used, so that `import epinorm` stays cheap and works on a machine without a GPU.
"""
