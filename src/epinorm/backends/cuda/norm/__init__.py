"""The norm kernels, forward and backward."""
