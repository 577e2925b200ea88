"""Megatron's older path of the HTTP server."""

from __future__ import annotations

from megatron_runtime.apis.text_generation_server import run_flask_server

__all__ = ["run_flask_server"]
