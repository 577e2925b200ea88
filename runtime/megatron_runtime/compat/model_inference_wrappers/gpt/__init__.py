"""Megatron's path of the wrapper of a GPTModel."""

from __future__ import annotations
