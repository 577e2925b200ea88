"""Kernels for GPUs, written in Triton: functions of tensors that know nothing of models and requests.

Only code for a CUDA device imports this package, because it needs Triton, which PyTorch's CUDA builds bring. Tests run
the kernels in Triton's interpreter and compile them for several generations of GPUs; ``make gpu`` checks them on one.
"""
