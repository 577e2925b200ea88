"""A process with one engine: python engine_process.py ADDRESS GROUP ATTEMPT STEP_SECONDS [GGUF]."""

from __future__ import annotations

import asyncio
import os
import sys

from messaging_support.fake_engine import FakeEngine

from megatron_runtime.engine.worker.engine_loop import Engine, EngineLoop


def build_engine(step_seconds: float, checkpoint: str | None) -> Engine:
    if checkpoint is None:
        return FakeEngine(step_seconds)
    import torch

    from megatron_runtime.config import InferenceConfig
    from megatron_runtime.engine.dynamic_engine import DynamicInferenceEngine
    from megatron_runtime.model.checkpoint import load_model, load_tokenizer

    torch.set_num_threads(1)
    config = InferenceConfig(kv_cache_memory_bytes=64 * 2**20)
    return DynamicInferenceEngine.build(load_model(checkpoint, dtype="float32"), load_tokenizer(checkpoint), config)


async def main() -> None:
    address, group, attempt, step_seconds, *checkpoint = sys.argv[1:]
    loop = EngineLoop(
        build_engine(float(step_seconds), checkpoint[0] if checkpoint else None),
        coordinator_address=address,
        replica_group=int(group),
        attempt=int(attempt),
        key=os.environ.get("MEGATRON_COORDINATOR_KEY"),
    )
    await loop.run()


asyncio.run(main())
