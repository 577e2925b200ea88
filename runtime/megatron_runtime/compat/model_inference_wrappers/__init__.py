"""Megatron's path of the wrappers of models."""

from __future__ import annotations
