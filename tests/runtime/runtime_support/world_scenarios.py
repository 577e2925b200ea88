"""The ranks' functions in the tests of the library in one world over all replica groups."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from runtime_support import lock_step_scenarios
from safetensors.torch import load_file
from torch.distributed import distributed_c10d

from megatron_runtime.apis import MegatronAsyncLLM, MegatronLLM, ParallelSizes, join_world
from megatron_runtime.config import InferenceConfig
from megatron_runtime.engine.dynamic_engine import DynamicInferenceEngine
from megatron_runtime.engine.worker.engine_loop import EngineLoop
from megatron_runtime.errors import (
    CheckpointError,
    ConfigurationError,
    CoordinatorError,
    EngineError,
    InvalidRequestError,
    InvalidStateError,
    LostRankError,
)
from megatron_runtime.headers import EngineState
from megatron_runtime.inference_client import InferenceClient
from megatron_runtime.model.checkpoint import load_model, load_tokenizer
from megatron_runtime.parallel import world_group
from megatron_runtime.parallel.ranks import Ranks
from megatron_runtime.sampling_params import SamplingParams

PROMPTS = [[*range(40, 61), 1], [*range(40, 61), 2, 3], [7] * 11, [9]]
GREEDY = SamplingParams(temperature=0, num_tokens_to_generate=32, ignore_eos=True)
DRAWN = SamplingParams(temperature=1.5, seed=5, n=2, num_tokens_to_generate=16)
STREAMED = SamplingParams(temperature=0, num_tokens_to_generate=200, ignore_eos=True, streaming=True)
ENDLESS = SamplingParams(temperature=0, num_tokens_to_generate=200, ignore_eos=True)

SIGNALS = {
    "pause": EngineState.PAUSED,
    "suspend": EngineState.SUSPENDED,
    "resume": EngineState.RESUMED,
    "unpause": EngineState.RUNNING,
    "stop": EngineState.STOPPED,
}
"""And the states that engines reach by them."""


def enter(rank: int, world_size: int, port: int, sizes: ParallelSizes, rendezvous_timeout: float = 60.0) -> Ranks:
    """As torchrun starts a process."""
    _take_place(rank, world_size, port)
    return join_world(sizes, timeout=20.0, rendezvous_timeout=rendezvous_timeout)


def _take_place(rank: int, world_size: int, port: int) -> None:
    place = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1")


def parts(path: Path, ranks: Ranks | None = None) -> dict[str, Any]:
    """The arguments of an LLM with this rank's part of the model."""
    config = InferenceConfig(buffer_size_gb=0.01, enable_prefix_caching=True, kv_cache_management_mode="recompute")
    model = load_model(path, dtype="float32", ranks=ranks)
    return {"model": model, "tokenizer": load_tokenizer(path), "inference_config": config}


def build(path: Path, ranks: Ranks | None = None, **options: Any) -> MegatronLLM:
    """An LLM with this rank's part of the model."""
    return MegatronLLM(**parts(path, ranks), **options)


def tokens(llm: MegatronLLM, params: SamplingParams = GREEDY) -> list[list[int]]:
    """The answers to PROMPTS."""
    return [request.generated_tokens for request in llm.generate(PROMPTS, params)]


def generate_directly(rank: int, world_size: int, port: int, sizes: ParallelSizes, old: Path, new: Path) -> Any:
    """Every rank generates, before and after a weight update, and once with different arguments."""
    ranks = enter(rank, world_size, port, sizes)
    llm = build(old, ranks)
    results = {"primary": llm.is_primary_rank, "greedy": tokens(llm), "drawn": tokens(llm, DRAWN)}
    without_seed = llm.generate(PROMPTS, SamplingParams(num_tokens_to_generate=4))
    results["without seed"] = [(request.generated_tokens, request.sampling_params.seed) for request in without_seed]
    try:
        llm.generate([[1, 2, rank]], GREEDY)
    except InvalidRequestError as error:
        results["error"] = str(error)
    results["version"] = llm.update_weights(new)
    results["renewed"] = tokens(llm)
    llm.shutdown()
    results["parameters"] = sum(parameter.numel() for parameter in llm.controller.model.parameters())
    ranks.close()
    return results


def generate_together(rank: int, world_size: int, port: int, sizes: ParallelSizes, old: Path, new: Path) -> Any:
    """Through the coordinator, with pause, suspension and weight update between answers."""
    ranks = enter(rank, world_size, port, sizes)
    results: dict[str, Any] = {}
    with build(old, ranks, use_coordinator=True) as llm:
        if llm.is_primary_rank:
            results["greedy"], results["drawn"] = tokens(llm), tokens(llm, DRAWN)
        else:
            try:
                tokens(llm)
            except RuntimeError as error:
                results["refused"] = str(error)
        with ThreadPoolExecutor() as pool:
            in_flight = pool.submit(tokens, llm, ENDLESS) if llm.is_primary_rank else None
            for step in (llm.pause, llm.suspend, llm.resume, llm.unpause, llm.pause, llm.unpause):
                step()
            results["in flight"] = None if in_flight is None else in_flight.result()
        llm.pause()
        for weights in (old / "nowhere", {"strange": torch.zeros(1)}):
            try:
                llm.update_weights(weights)
            except CheckpointError as error:
                results.setdefault("errors", []).append(str(error))
        for form, weights in (("files", new), ("tensors", load_file(old / "model.safetensors"))):
            if form == "tensors":
                llm.pause()
            results[f"version by {form}"] = llm.update_weights(weights)
            llm.unpause()
            if llm.is_primary_rank:
                renewed = llm.generate(PROMPTS, GREEDY)
                results[f"renewed by {form}"] = [request.generated_tokens for request in renewed]
                results[f"versions by {form}"] = {request.weight_version for request in renewed}
        results["steps"] = llm.engine.stats().generated_tokens_total
    results["state"] = llm.engine.state.name
    ranks.close()
    return results


def serve_with_interruptions(rank: int, world_size: int, port: int, sizes: ParallelSizes, path: Path, mode: str) -> Any:
    """All features in which ranks could differ, per replica group, with small passes, few blocks and a suspension."""
    ranks = enter(rank, world_size, port, sizes)
    model = load_model(path, dtype="float32", ranks=ranks)
    config = lock_step_scenarios.tight(model, kv_cache_management_mode=mode, offload_weights=True)
    results: dict[str, Any] = {}
    llm = MegatronLLM(model=model, tokenizer=load_tokenizer(path), inference_config=config, use_coordinator=True)
    with llm, ThreadPoolExecutor() as pool:
        copies = world_size // sizes.ranks_per_replica_group
        answers = [pool.submit(_answer_all, llm) for _ in range(copies)] if llm.is_primary_rank else []
        while llm.is_primary_rank and llm.engine.stats().generated_tokens_total < 20:
            time.sleep(0.01)
        for step in (llm.pause, llm.suspend, llm.resume, llm.unpause):
            step()
        results["is streaming"] = not all(future.done() for future in answers)
        results["answers"] = [future.result() for future in answers]
    llm.engine.check_integrity()
    results["stats"] = llm.engine.stats()
    ranks.close()
    return results


def _answer_all(llm: MegatronLLM) -> list[lock_step_scenarios.Answer]:
    prompts, params = lock_step_scenarios.PROMPTS, lock_step_scenarios.PARAMS
    with ThreadPoolExecutor() as pool:
        found = [pool.submit(llm.generate, *each) for each in zip(prompts, params, strict=True)]
        return [lock_step_scenarios.Answer.of(future.result()[0]) for future in found]


def stream(rank: int, world_size: int, port: int, sizes: ParallelSizes, path: Path) -> list[int] | None:
    """A streamed answer on the primary rank, with a pause and a suspension on all ranks."""
    ranks = enter(rank, world_size, port, sizes)

    async def stream_answer() -> list[int] | None:
        async with MegatronAsyncLLM(**parts(path, ranks), use_coordinator=True) as llm:
            answer = llm.generate_stream(PROMPTS[0], STREAMED) if llm.is_primary_rank else None
            tokens = (await anext(answer)).new_tokens if answer is not None else []
            for step in (llm.pause, llm.suspend, llm.resume, llm.unpause):
                await step()
            if answer is None:
                return None
            return [*tokens, *[token async for update in answer for token in update.new_tokens]]

    result = asyncio.run(stream_answer())
    ranks.close()
    return result


def update_while_running(rank: int, world_size: int, port: int, sizes: ParallelSizes, path: Path) -> str:
    """Every rank refuses a weight update, and none waits for the others."""
    ranks = enter(rank, world_size, port, sizes)
    with build(path, ranks, use_coordinator=True) as llm:
        try:
            llm.update_weights(path)
        except InvalidStateError as error:
            return str(error)
    return "nothing"


def miss_coordinator(rank: int, world_size: int, port: int, sizes: ParallelSizes, path: Path) -> str:
    """The coordinator's host is another machine."""
    ranks = enter(rank, world_size, port, sizes)
    try:
        build(path, ranks, use_coordinator=True, coordinator_host="192.0.2.1")
    except (ConfigurationError, CoordinatorError) as error:
        return str(error)
    return "nothing"


def lose(
    rank: int, world_size: int, port: int, sizes: ParallelSizes, path: Path, mode: str, victim: int, dies: bool
) -> Any:
    """One rank is killed or fails while the primary one generates; the primary one generates again afterwards."""
    ranks = enter(rank, world_size, port, sizes)
    llm = build(path, ranks, use_coordinator=mode == "coordinated")
    start = time.monotonic()
    if rank == victim:
        act = _die if dies else partial(setattr, llm.engine, "step_modern", _fail)
        threading.Thread(target=_do_while_generating, args=(llm, act), daemon=True).start()
    results: dict[str, Any] = {}
    try:
        if llm.is_primary_rank:
            while _copies(llm) == world_size // sizes.ranks_per_replica_group:
                tokens(llm, ENDLESS)
            results["answers"] = tokens(llm, GREEDY)
        llm.shutdown()
    except (EngineError, ArithmeticError) as error:
        results["error"] = str(error)
    results["seconds"] = time.monotonic() - start
    return results


def _do_while_generating(llm: MegatronLLM, act: Callable[[], None]) -> None:
    while llm.engine.stats().generated_tokens_total < 20:
        time.sleep(0.01)
    act()


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _fail() -> None:
    raise ArithmeticError("the device is on fire")


def _copies(llm: MegatronLLM) -> int:
    """The engines of the coordinator, or the one of direct mode."""
    if llm._runtime is None:
        return 1
    assert llm._runtime._client is not None
    state = llm.run_sync(llm._runtime._client.service_state())
    return sum(engine.ready for engine in state.engines)


def follow_states(rank: int, world_size: int, port: int, path: Path) -> list[str]:
    """The states that every rank waits for, as `examples/coordinator.py` does; rank 1 takes long to register."""
    engine = DynamicInferenceEngine.build(*parts(path, enter(rank, world_size, port, ParallelSizes())).values())
    run, reached = EngineLoop.run, []

    async def run_late(loop: EngineLoop) -> None:
        await asyncio.sleep(2.0 * rank)
        await run(loop)

    async def serve() -> None:
        address = await engine.start_listening_to_data_parallel_coordinator()
        client = InferenceClient(address) if rank == 0 else None
        if client is not None:
            await client.start()
        for name, state in SIGNALS.items():
            if client is not None:
                getattr(client, f"{name}_engines")()
            await engine.wait_until(state)
            reached.append(state.name)
        if client is not None:
            client.shutdown_coordinator()
            client.stop()

    with patch.object(EngineLoop, "run", run_late):
        asyncio.run(serve())
    return reached


def miss(rank: int, absent: int, world_size: int, port: int) -> str | None:
    """One of the ranks of a world does not join."""
    if rank == absent:
        return None
    try:
        enter(rank, world_size, port, ParallelSizes(), rendezvous_timeout=6.0)
    except LostRankError as error:
        return f"{error}; {error.missing}"
    return "nothing"


def join_late(rank: int, slow: int, port: int, occasion: str, path: Path) -> str | None:
    """One of three ranks misses the next collective call within the timeout of the others."""
    world_group.LOAD_TIMEOUT = 4.0
    if occasion == "join_world":
        _take_place(rank, 3, port)
        dist.init_process_group("gloo")
        come: Callable[[], object] = partial(join_world, rendezvous_timeout=4.0)
    else:
        come = partial(build, path, enter(rank, 3, port, ParallelSizes()), use_coordinator=True)
    given_up = [f"given up/{other}" for other in range(3) if other != slow]
    store = distributed_c10d._get_default_store()
    if rank == slow:
        store.wait(given_up, timedelta(seconds=60))
        return None
    try:
        come()
    except LostRankError as error:
        return f"{error}; {error.missing}"
    finally:
        store.set(f"given up/{rank}", "")
        if rank == 0:  # which has the store
            store.wait(given_up, timedelta(seconds=60))
            time.sleep(0.5)
    return "nothing"


def lose_before_start(rank: int, port: int, path: Path) -> tuple[str, float]:
    """One of the two ranks of a replica group is killed after it has loaded its part."""
    loaded = parts(path, enter(rank, 2, port, ParallelSizes(tensor=2)))
    if rank == 1:
        _die()
    start = time.monotonic()
    try:
        MegatronLLM(**loaded, use_coordinator=True)
    except LostRankError as error:
        return str(error), time.monotonic() - start
    return "nothing", 0.0


def refuse(rank: int, world_size: int, port: int, sizes: ParallelSizes) -> str:
    """A world of another size."""
    try:
        enter(rank, world_size, port, sizes)
    except ConfigurationError as error:
        return str(error)
    return "nothing"
