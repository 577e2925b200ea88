"""Attention and row operations: compiled kernels of this package on CPUs, PyTorch elsewhere."""
