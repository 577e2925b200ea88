"""Engines, a coordinator and a client without MegatronLLM, as Megatron's example of its coordinator uses them.

Every rank runs an engine that listens to the coordinator. Rank 0 also has the client, which submits the requests and
sends the lifecycle signals. All ranks wait for the states of their engines.

Usage: ``torchrun --nproc-per-node 2 examples/coordinator.py --load MODEL``: two replica groups of one rank.
"""

from __future__ import annotations

import argparse
import asyncio
from contextlib import closing

from megatron_runtime.contexts.dynamic_context import DynamicInferenceContext
from megatron_runtime.engines.dynamic_engine import DynamicInferenceEngine, EngineState
from megatron_runtime.text_generation_controllers.text_generation_controller import TextGenerationController

from megatron_runtime.apis import ParallelSizes, join_world
from megatron_runtime.config import InferenceConfig
from megatron_runtime.inference_client import InferenceClient
from megatron_runtime.model.checkpoint import load_model, load_tokenizer
from megatron_runtime.parallel.ranks import Ranks
from megatron_runtime.sampling_params import SamplingParams


def main() -> None:
    """Runs on every rank."""
    options = _parse()
    sizes = ParallelSizes(tensor=options.tensor_model_parallel_size, pipeline=options.pipeline_model_parallel_size)
    with closing(join_world(sizes)) as ranks:
        engine = build_engine(options, ranks)
        is_primary = ranks.position.is_first and ranks.position.replica_group == 0
        asyncio.run(serve(engine, options, is_primary=is_primary))


def build_engine(options: argparse.Namespace, ranks: Ranks) -> DynamicInferenceEngine:
    """This rank's part of the model in an engine."""
    model = load_model(options.load, dtype=options.dtype, ranks=ranks)
    config = InferenceConfig(buffer_size_gb=options.inference_dynamic_batching_buffer_size_gb)
    context = DynamicInferenceContext(model.config, config, dtype=model.dtype, device=model.device, shard=model.shard)
    return DynamicInferenceEngine(TextGenerationController(model, load_tokenizer(options.load)), context)


async def serve(engine: DynamicInferenceEngine, options: argparse.Namespace, *, is_primary: bool) -> None:
    """Answer the prompts, before and after a suspension."""
    address = await engine.start_listening_to_data_parallel_coordinator(options.inference_coordinator_port)
    client = InferenceClient(address) if is_primary else None
    if client is not None:
        await client.start()
        await generate(client, options)
        client.pause_engines()
    await engine.wait_until(EngineState.PAUSED)
    if client is not None:
        client.suspend_engines()
    await engine.wait_until(EngineState.SUSPENDED)
    # A trainer would use the memory now.
    if client is not None:
        client.resume_engines()
    await engine.wait_until(EngineState.RESUMED)
    if client is not None:
        client.unpause_engines()
    await engine.wait_until(EngineState.RUNNING)
    if client is not None:
        await generate(client, options)
        client.stop_engines()
    await engine.wait_until(EngineState.STOPPED)
    if client is not None:
        client.shutdown_coordinator()
        client.stop()


async def generate(client: InferenceClient, options: argparse.Namespace) -> None:
    """Submit all prompts at once, and print the answers."""
    params = SamplingParams(temperature=1.0, top_k=1, num_tokens_to_generate=options.num_tokens_to_generate)
    records = await asyncio.gather(*(client.add_request(prompt, params) for prompt in options.prompts))
    for prompt, record in zip(options.prompts, records, strict=True):
        print(f"{prompt}{record.merge().generated_text}", flush=True)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--load", required=True, help="folder or file of a checkpoint")
    parser.add_argument("--dtype", default="auto")
    for kind in ("tensor", "pipeline"):
        parser.add_argument(f"--{kind}-model-parallel-size", type=int, default=1)
    parser.add_argument("--inference-coordinator-port", type=int, help="default: any free port")
    parser.add_argument("--inference-dynamic-batching-buffer-size-gb", type=float, default=1.0)
    parser.add_argument("--prompts", nargs="+", default=["Water boils at", "The capital of France is"])
    parser.add_argument("--num-tokens-to-generate", type=int, default=30)
    return parser.parse_args()


if __name__ == "__main__":
    main()
