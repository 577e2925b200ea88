"""Matrices that stay quantized in memory, on a CPU."""
