"""Attention in fp32 by products in TF32: kernels in Triton, which is where TorchInductor is."""
