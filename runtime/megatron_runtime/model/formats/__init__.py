"""Readers of checkpoints: GGUF, safetensors and torch_dist; names, sizes and configuration, without torch."""
