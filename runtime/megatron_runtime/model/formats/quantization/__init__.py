"""Quantized matrices in safetensors files: fp8, compressed-tensors, GPTQ and AWQ."""
