"""LoRA adapters in peft's format, several of them on one model."""
