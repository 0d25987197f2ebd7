"""The operation itself: checks, dispatch, PyTorch's library, autograd."""
