"""Megatron's path of the streams of a client."""

from __future__ import annotations

from megatron_runtime.inference_client.async_stream import STOP_ITERATION, AsyncStream

__all__ = ["STOP_ITERATION", "AsyncStream"]
