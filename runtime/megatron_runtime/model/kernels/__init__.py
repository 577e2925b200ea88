"""Attention and row operations: this package's own kernels for CPUs, PyTorch's elsewhere."""
