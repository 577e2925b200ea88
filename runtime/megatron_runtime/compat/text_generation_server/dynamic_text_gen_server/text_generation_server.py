"""Megatron's path of the functions of the HTTP server."""

from __future__ import annotations

from megatron_runtime.apis.text_generation_server import start_text_gen_server, stop_text_gen_server

__all__ = ["start_text_gen_server", "stop_text_gen_server"]
