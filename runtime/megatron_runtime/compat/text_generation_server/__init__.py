"""Megatron's path of HTTP servers."""

from __future__ import annotations
