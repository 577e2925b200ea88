"""Megatron's path of the HTTP server of an engine with a coordinator."""

from __future__ import annotations

from megatron_runtime.apis.text_generation_server import run_flask_server, start_text_gen_server, stop_text_gen_server

__all__ = ["run_flask_server", "start_text_gen_server", "stop_text_gen_server"]
