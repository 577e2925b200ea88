"""Kernels for GPUs, written in Triton: functions of tensors that know nothing of models and requests.

Only code for a CUDA device imports this package, because it needs Triton, which PyTorch's CUDA builds bring. Tests run
the kernels in Triton's interpreter and compile them for three generations of GPUs; none of them has run on a GPU yet.
"""
