"""One rank: ``python -m megatron_runtime.rank``, started by the launcher. Loads its part of the model and serves it.

The first rank of a replica group connects to the coordinator; the others are followers, which execute its actions.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import logging
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from megatron_runtime import tracing
from megatron_runtime.errors import CheckpointError, ConfigurationError, EngineError, LockStepError, LostRankError
from megatron_runtime.launch.pod_state import RankPhase
from megatron_runtime.launch.rank_options import RankOptions, RankPlan
from megatron_runtime.parallel.timeouts import LOAD_TIMEOUT
from megatron_runtime.processes.background import in_background
from megatron_runtime.processes.idle_memory import return_memory_at_rest
from megatron_runtime.processes.parent_link import EXIT_BAD_INPUT, EXIT_DRAINED, EXIT_FAILURE, ParentLink
from megatron_runtime.processes.supervisor import error_report
from megatron_runtime.wire.security import KEY_VARIABLE

if TYPE_CHECKING:
    from megatron_runtime.config import InferenceConfig
    from megatron_runtime.engine.dynamic_engine import DynamicInferenceEngine
    from megatron_runtime.engine.worker.engine_loop import EngineLoop
    from megatron_runtime.launch.options import EngineOptions
    from megatron_runtime.model.decoder import Decoder
    from megatron_runtime.model.tokenizer import Tokenizer
    from megatron_runtime.model.weights import LoadProgress
    from megatron_runtime.parallel.ranks import Ranks

logger = logging.getLogger(__name__)

PROGRESS_SECONDS = 0.1
"""Minimum interval of progress reports."""
POLL_SECONDS = 0.5
"""Interval in which the registration is checked."""
FEW_REQUESTS = 32
"""So many do not need the memory that a larger load has left behind."""


def main() -> None:
    """Exits with 0 after a drain or a stop, with 2 when the input can't be served."""
    link = ParentLink.from_arguments()
    options = RankOptions.deserialize(link.options)
    _report_phase(link, RankPhase.STARTING)
    preload()
    gc.freeze()  # The objects of the imports are permanent, and take long to scan.
    # By now the launcher has inspected the checkpoint, or is about to finish.
    link.receive_options()
    plan = RankPlan.deserialize(link.options)
    try:
        engine = _build_engine(link, options, plan)
        ranks = engine.controller.model.ranks
        ranks.barrier("ready", LOAD_TIMEOUT)
        serve = _serve(link, options, plan, engine) if ranks.position.is_first else _run_follower(link, engine, ranks)
        asyncio.run(serve)
        ranks.close()
    except (CheckpointError, ConfigurationError) as error:
        _end_with(link, error, EXIT_BAD_INPUT)
    except LostRankError as error:
        _end_at_once(link, options, error)
    except LockStepError as error:
        _end_with(link, error, EXIT_FAILURE)
    sys.exit(EXIT_DRAINED)


def _end_with(link: ParentLink, error: Exception, exit_code: int) -> None:
    link.report(error=error_report(error))
    logger.error("%s", error)
    sys.exit(exit_code)


def _end_at_once(link: ParentLink, options: RankOptions, error: LostRankError) -> None:
    """Without cleanup: other threads, and torch at exit, may still wait for the lost rank."""
    start = options.replica_group * options.engine.sizes.ranks_per_replica_group
    link.report(error={**error_report(error), "missing": [start + rank for rank in error.missing]})
    logger.error("%s", error)
    os._exit(EXIT_FAILURE)


def _build_engine(link: ParentLink, options: RankOptions, plan: RankPlan) -> DynamicInferenceEngine:
    import torch

    from megatron_runtime.engine.dynamic_engine import DynamicInferenceEngine
    from megatron_runtime.launch.draft_model import load_draft_model
    from megatron_runtime.launch.rank_device import choose_device
    from megatron_runtime.model.checkpoint import load_model
    from megatron_runtime.model.device_memory import naming_device_memory
    from megatron_runtime.model.refit import keep_places
    from megatron_runtime.model.tokenizer import load_tokenizer

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    device = choose_device(options)
    with naming_device_memory("while it joined the other ranks", device):
        ranks = _join_replica_group(link, options)
    ranks.watch(partial(_end_at_once, link, options))
    # The launchers of several pods may have chosen different lengths.
    plan = replace(plan, max_sequence_length=ranks.least(plan.max_sequence_length))
    with ThreadPoolExecutor(1, "tokenizer") as aside:
        tokenizer = aside.submit(load_tokenizer, plan.checkpoint)
        with naming_device_memory("while it loaded the weights", device):
            model = load_model(
                plan.checkpoint,
                dtype=options.engine.dtype,
                quantized_weights=options.engine.quantized_weights,
                device=device,
                max_sequence_length=plan.max_sequence_length,
                on_progress=_Progress(link),
                check_finite=options.engine.check_finite,
                ranks=ranks,
                block_size_tokens=options.engine.block_size_tokens,
                kv_cache_dtype=options.engine.kv_cache_dtype,
                attention_backend=options.engine.attention_backend,
            )
            draft = load_draft_model(
                options.engine, tokenizer.result(), device=device, max_sequence_length=plan.max_sequence_length
            )
    config = replace(_inference_config(options.engine, plan), speculative_draft_model=draft)
    if config.offload_weights:
        for each in filter(None, (model, draft)):
            keep_places(each, device)  # While there is much memory: the KV cache gets nearly all of the rest.
    with naming_device_memory("while it prepared the engine", device):
        # Measured, or chosen by the launchers of several pods, so it may differ between the ranks.
        cache = plan.kv_cache_bytes or _measured_kv_cache(model, tokenizer.result(), config)
        config = replace(config, kv_cache_memory_bytes=ranks.least(cache))
        engine = DynamicInferenceEngine.build(model, tokenizer.result(), config)
        _load_adapters(engine, options.engine)
    return engine


def _load_adapters(engine: DynamicInferenceEngine, options: EngineOptions) -> None:
    for name, path in options.lora_modules:
        engine.adapters.load(name, path)
        logger.info("Loaded the adapter %s from %s", name, path)


def _measured_kv_cache(model: Decoder, tokenizer: Tokenizer, config: InferenceConfig) -> int:
    from megatron_runtime.engine.largest_pass import measure_kv_cache_memory
    from megatron_runtime.engine.text_generation_controller import TextGenerationController

    controller = TextGenerationController(model, tokenizer)
    size = model.ranks.supervise(partial(measure_kv_cache_memory, controller, config), LOAD_TIMEOUT)
    logger.info("weights and the largest pass leave %.1f GB for the KV cache", size / 1e9)
    return size


def preload() -> None:
    """Imports the modules of a rank, which takes two seconds, while the launcher inspects the checkpoint."""
    for module in ("engine.worker.engine_loop", "engine.dynamic_engine", "model.checkpoint", "model.tokenizer"):
        importlib.import_module(f"megatron_runtime.{module}")
    importlib.import_module("megatron_runtime.model.kernels.compiled").import_loader()


def _join_replica_group(link: ParentLink, options: RankOptions) -> Ranks:
    """Connects to the other ranks of the replica group, if there are any."""
    from megatron_runtime.parallel.join import join_replica_group
    from megatron_runtime.parallel.single_rank import SingleRank

    sizes = options.engine.sizes
    if sizes.ranks_per_replica_group == 1:
        return SingleRank(options.replica_group)
    assert options.rendezvous_address is not None
    host, port = options.rendezvous_address
    _report_phase(link, RankPhase.RENDEZVOUS)
    try:
        return join_replica_group(
            sizes.position_in_replica_group(options.rank % sizes.ranks_per_replica_group, options.replica_group),
            host=host,
            port=port,
            # Without a key, the launcher uses loopback addresses only.
            key=os.environ.get(KEY_VARIABLE, ""),
            attempt=options.attempt,
            device_type=options.engine.device,
            rendezvous_timeout=options.rendezvous_timeout,
        )
    except ConfigurationError as error:
        raise EngineError(str(error)) from error  # the port was free when it was chosen; a restart chooses another one


def _inference_config(engine: EngineOptions, plan: RankPlan) -> InferenceConfig:
    from megatron_runtime.config import InferenceConfig, KVCacheManagementMode

    return InferenceConfig(
        block_size_tokens=engine.block_size_tokens,
        kv_cache_dtype=engine.kv_cache_dtype,
        max_requests=engine.max_requests,
        num_cuda_graphs=_num_cuda_graphs(engine),
        batch_invariant=engine.batch_invariant,
        num_speculative_tokens=engine.num_speculative_tokens,
        max_sequence_length=plan.max_sequence_length,
        mamba_memory_ratio=engine.mamba_memory_ratio,
        enable_prefix_caching=engine.prefix_caching,
        prefix_caching_mamba_gb=engine.prefix_caching_mamba_gb,
        enable_chunked_prefill=engine.chunked_prefill,
        kv_cache_management_mode=KVCacheManagementMode(engine.kv_cache_management),
        offload_weights=engine.offload_weights,
        logprobs_mode=engine.logprobs_mode,
        moe_enable_routing_replay=engine.moe_enable_routing_replay,
        max_loras=engine.max_loras,
        max_lora_rank=engine.max_lora_rank,
        grammar_cache_bytes=engine.grammar_cache_bytes,
    )


def _num_cuda_graphs(engine: EngineOptions) -> int | None:
    if engine.num_cuda_graphs is None:
        return -1 if engine.device == "cuda" else None
    return engine.num_cuda_graphs


async def _serve(link: ParentLink, options: RankOptions, plan: RankPlan, engine: DynamicInferenceEngine) -> None:
    """Serves the coordinator's requests until it sends STOP, or until the drain after SIGTERM is done."""
    from megatron_runtime.engine.worker.engine_loop import EngineLoop
    from megatron_runtime.engine.worker.lock_step import LockStepEngine, run_in_lock_step

    tracing.start()
    ranks = engine.controller.model.ranks
    lock_step = LockStepEngine(engine, ranks) if ranks.position.sizes.ranks_per_replica_group > 1 else None
    loop = EngineLoop(
        lock_step or engine,
        coordinator_address=plan.coordinator_address,
        replica_group=options.replica_group,
        attempt=options.attempt,
        key=os.environ.get(KEY_VARIABLE),
        prepare_thread=lambda: _use_device_of(engine),
    )
    drains: list[asyncio.Task[bool]] = []

    def drain() -> None:
        if not drains:
            drains.append(asyncio.create_task(loop.drain(options.drain_timeout)))

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, drain)
    _report_phase(link, RankPhase.REGISTERING)
    try:
        async with in_background(_report_registration(link, loop), link.keep_beating(), _return_memory(engine)):
            await (loop.run() if lock_step is None else run_in_lock_step(loop, lock_step))
    finally:
        await asyncio.gather(*drains, return_exceptions=True)


async def _run_follower(link: ParentLink, engine: DynamicInferenceEngine, ranks: Ranks) -> None:
    """Runs until the first rank releases this one; only the first rank handles SIGTERM."""
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, lambda: None)
    async with in_background(link.keep_beating(), _return_memory(engine)):
        _report_phase(link, RankPhase.SERVING)
        await asyncio.to_thread(_run_follower_on_device, engine, ranks)


async def _return_memory(engine: DynamicInferenceEngine) -> None:
    def is_loaded() -> bool:
        stats = engine.stats()
        return stats.running + stats.waiting > FEW_REQUESTS

    await return_memory_at_rest(is_loaded)


def _run_follower_on_device(engine: DynamicInferenceEngine, ranks: Ranks) -> None:
    from megatron_runtime.engine.worker.follower_actions import run_follower

    _use_device_of(engine)
    run_follower(engine, ranks)


def _use_device_of(engine: DynamicInferenceEngine) -> None:
    """Sets the current GPU of this thread, which is the first one by default."""
    import torch

    if engine.context.device.type == "cuda":
        torch.cuda.set_device(engine.context.device)


async def _report_registration(link: ParentLink, loop: EngineLoop) -> None:
    """Reports the first registration as the phase Serving, and changes of the registration afterwards."""
    await loop.registered.wait()
    _report_phase(link, RankPhase.SERVING)
    registered = False
    while True:
        if loop.registered.is_set() != registered:
            registered = not registered
            link.report(registered=registered)
        await asyncio.sleep(POLL_SECONDS)


def _report_phase(link: ParentLink, phase: RankPhase) -> None:
    link.report(phase=phase.value)


class _Progress:
    """Reports the number of loaded bytes of the weights, at a limited rate."""

    def __init__(self, link: ParentLink) -> None:
        self._link = link
        self._next = 0.0

    def __call__(self, progress: LoadProgress) -> None:
        now = time.monotonic()
        if now < self._next and progress.loaded_bytes < progress.total_bytes:
            return
        self._next = now + PROGRESS_SECONDS
        if progress.loaded_bytes == progress.total_bytes:
            megabytes, rate = progress.total_bytes / 1e6, progress.bytes_per_second / 1e6
            logger.info("Loaded %.1f MB of weights in %.1f s (%.1f MB/s)", megabytes, progress.seconds, rate)
        self._link.report(
            phase=RankPhase.LOADING.value, loadedBytes=progress.loaded_bytes, totalBytes=progress.total_bytes
        )


if __name__ == "__main__":
    main()
