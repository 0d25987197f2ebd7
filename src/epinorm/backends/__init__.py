"""What computes a problem: plain PyTorch, the CPU, CUDA GPUs."""
