"""Megatron's path of controllers."""

from __future__ import annotations
