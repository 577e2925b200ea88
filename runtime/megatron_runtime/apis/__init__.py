"""The library API."""

from __future__ import annotations

from megatron_runtime.apis.async_llm import MegatronAsyncLLM
from megatron_runtime.apis.llm import MegatronLLM
from megatron_runtime.apis.serve_config import ServeConfig

__all__ = ["MegatronAsyncLLM", "MegatronLLM", "ServeConfig"]
