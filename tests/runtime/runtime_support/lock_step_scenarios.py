"""The ranks' functions in the tests of lock step, in a module that their processes can import."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from runtime_support.adapters import without_memory
from runtime_support.device_collectives import use_collectives
from runtime_support.group_scenarios import join

from megatron_runtime.config import InferenceConfig
from megatron_runtime.engine.dynamic_engine import DynamicInferenceEngine
from megatron_runtime.engine.profiler import FOLDER_VARIABLE
from megatron_runtime.engine.sampling.grammar import RequestGuide
from megatron_runtime.engine.text_generation_controller import StepOutput
from megatron_runtime.engine.worker.follower_actions import run_follower
from megatron_runtime.engine.worker.lock_step import LockStepEngine
from megatron_runtime.errors import CheckpointError, LockStepError, LostRankError
from megatron_runtime.guides import lark_grammar, regex_grammar
from megatron_runtime.inference_request import DynamicInferenceRequest
from megatron_runtime.model.attention_kind import attention_kind
from megatron_runtime.model.checkpoint import load_model, load_tokenizer
from megatron_runtime.model.decoder import Decoder
from megatron_runtime.model.kv_cache import KVCache
from megatron_runtime.parallel.layout import ParallelSizes
from megatron_runtime.parallel.ranks import Ranks
from megatron_runtime.sampling_params import SamplingParams
from megatron_runtime.wire.items import AdapterEntry

BLOCK, MAX_REQUESTS = 4, 4
STEM = list(range(40, 61))
PROMPTS: list[Any] = [[*STEM, 1], [*STEM, 2, 3], "as text", [7] * 11, [9], [8, 8], [5]]
PARAMS = [
    SamplingParams(temperature=0, num_tokens_to_generate=40, return_log_probs=True, top_n_logprobs=2, tenant="other"),
    SamplingParams(seed=5, temperature=1.5, top_p=0.9, num_tokens_to_generate=40, body="large", answers=9),
    SamplingParams(
        temperature=0,
        num_tokens_to_generate=30,
        repetition_penalty=1.4,
        skip_prompt_log_probs=True,
        body="large",
        answers=9,
    ),
    SamplingParams(seed=6, min_p=0.01, num_tokens_to_generate=20, return_log_probs=True, skip_prompt_log_probs=False),
    SamplingParams(temperature=0, num_tokens_to_generate=40, stop_token_ids=[3]),
    SamplingParams(seed=7, grammar=regex_grammar("[ab]{20}")),
    SamplingParams(temperature=0, grammar=lark_grammar('start: "a" start')),
]
"""Requests with all features in which ranks could differ: text, sampling, log probabilities, penalties, stop strings, a
grammar, and a grammar without an end, which fails after a token. Some of the first are evicted for the later ones."""
LATER = range(3, len(PROMPTS))
"""The requests that are added after some steps."""


@dataclass(frozen=True)
class Answer:
    """The result of a request."""

    tokens: list[int]
    text: str
    reason: str
    log_probs: list[float]

    @classmethod
    def of(cls, request: DynamicInferenceRequest) -> Answer:
        """The result of a merged request."""
        return cls(
            request.generated_tokens,
            request.generated_text or "",
            str(request.finish_reason),
            [*(request.prompt_log_probs or []), *(request.generated_log_probs or [])],
        )

    def __eq__(self, other: object) -> bool:
        """Compare with tolerance: sums over several ranks differ from those of one in the last digits."""
        assert isinstance(other, Answer)
        results = (self.tokens, self.text, self.reason) == (other.tokens, other.text, other.reason)
        return results and self.log_probs == pytest.approx(other.log_probs, abs=1e-4)


def build(path: Path, ranks: Ranks | None = None, blocks: int = 24, **settings: Any) -> DynamicInferenceEngine:
    """An engine with small passes and few blocks, so that requests are evicted; the whole model or this rank's part.
    The answers of large bodies take turns."""
    model = load_model(path, dtype="float32", ranks=ranks)
    engine = DynamicInferenceEngine.build(model, load_tokenizer(path), tight(model, blocks, **settings))
    engine.scheduler.limits = replace(engine.scheduler.limits, shared_rows=2)
    return engine


def tight(model: Decoder, blocks: int = 24, **settings: Any) -> InferenceConfig:
    """Small passes and few blocks, so that requests are evicted. A model with states does not draft, and has room for
    snapshots, because no length is promised.
    """
    block = KVCache.block_bytes(model.shard.largest_cache_config, BLOCK, model.dtype)
    if (draft := settings.get("speculative_draft_model")) is not None:
        block += KVCache.block_bytes(draft.config, BLOCK, draft.dtype)
    states = attention_kind(model.shard.largest_cache_config).cache_layout.state_bytes
    if states:
        settings |= {"num_speculative_tokens": 0, "max_sequence_length": None}
    return InferenceConfig(
        block_size_tokens=BLOCK,
        kv_cache_memory_bytes=blocks * block + 2 * MAX_REQUESTS * states,
        max_requests=MAX_REQUESTS,
        max_tokens=16,
        enable_prefix_caching=True,
        **settings,
    )


def serve(engine: Any, *, interrupt: Callable[[int], None] = lambda _: None) -> list[Answer]:
    """The results of all prompts, the last ones added after some steps. Calls ``interrupt`` before every step."""
    futures = [engine.add_request(i, PROMPTS[i], PARAMS[i]) for i in range(3)]
    step = 0
    while engine.has_unfinished_requests():
        if step == 4:
            engine.compile_grammar(str(PARAMS[5].grammar))
        if step == 5:
            futures += [engine.add_request(i, PROMPTS[i], PARAMS[i]) for i in LATER]
        interrupt(step)
        engine.step_modern()
        step += 1
    engine.release_grammar(str(PARAMS[5].grammar))
    return [Answer.of(future.result(timeout=0).merge()) for future in futures]


def serve_as_on_gpus(rank: int, *args: Any) -> dict[str, Any]:
    """As `serve_in_lock_step`, where each tensor parallel rank of the last stage samples."""
    use_collectives()
    return serve_in_lock_step(rank, *args)


def serve_in_lock_step(
    rank: int, sizes: ParallelSizes, port: int, path: Path, mode: str, draft: Path | None = None
) -> dict[str, Any]:
    """The same on several ranks, with a pause and a suspension in between. Each rank measures other times of masks.

    Tokens are drafted by the checkpoint ``draft``, or copied from earlier ones.
    """
    setattr(RequestGuide, "mask_milliseconds", property(lambda _: 5 + rank, lambda _, __: None))  # noqa: B010
    ranks = join(sizes, rank, port)
    model = None if draft is None else load_model(draft, dtype="float32")
    settings = {"num_speculative_tokens": 3, "speculative_draft_model": model}
    engine = build(path, ranks, kv_cache_management_mode=mode, offload_weights=True, **settings)
    results: dict[str, Any] = {}
    _count_sampled_passes(engine, results)
    if rank:
        run_follower(engine, ranks)
    else:
        first = LockStepEngine(engine, ranks)

        def interrupt(step: int) -> None:
            if step == 12:
                first.barrier("pause")
            if step == 15:
                first.suspend()
                first.resume()

        results["answers"] = serve(first, interrupt=interrupt)
        results["evictions"] = first.stats().evictions_total
        future = first.add_request(9, [1], SamplingParams(num_tokens_to_generate=1000))
        results["too long"] = future.result(timeout=0).merge().status.name
        aborted = first.add_request(10, [1, 2], SamplingParams(num_tokens_to_generate=9, ignore_eos=True))
        first.step_modern()
        first.abort_request(10)
        results["aborted"] = aborted.result(timeout=0).merge().finish_reason
        known = first.stats().generated_tokens_total
        for request_id in (11, 12):
            first.add_request(request_id, [request_id], SamplingParams(num_tokens_to_generate=2, ignore_eos=True))
        first.step_modern()
        results["tokens of a step"] = first.stats().generated_tokens_total - known
        first.barrier("pause")
        results["tokens before a pause"] = first.stats().generated_tokens_total - known
        first.release_followers()
    engine.check_integrity()
    results["stats"] = engine.stats()
    ranks.close()
    return results


def _count_sampled_passes(engine: DynamicInferenceEngine, results: dict[str, Any]) -> None:
    results["sampled passes"] = 0

    def run(*args: Any, sample: Callable[..., StepOutput] = engine.controller.run) -> StepOutput:
        results["sampled passes"] += 1
        return sample(*args)

    setattr(engine.controller, "run", run)  # noqa: B010


def renew(rank: int, sizes: ParallelSizes, port: int, old: Path, new: Path) -> dict[str, Any]:
    """Update the weights between requests, after attempts with missing weights; then with an epoch and a trace."""
    os.environ[FOLDER_VARIABLE] = str(new.parent / "profiles")
    ranks = join(sizes, rank, port)
    engine = build(old, ranks)
    results: dict[str, Any] = {}
    if rank:
        run_follower(engine, ranks)
    else:
        first = LockStepEngine(engine, ranks)
        for weights in (old / "nowhere", {"norm": None}):
            try:
                first.update_weights(weights)  # type: ignore[arg-type]
            except CheckpointError as error:
                results.setdefault("errors", []).append(str(error))
        results["version"] = first.update_weights(new)
        results["answers"] = serve(first)
        first.set_generation_epoch(3)
        first.start_profiler()
        future = first.add_request(9, [1, 2], SamplingParams(num_tokens_to_generate=2, ignore_eos=True))
        while first.has_unfinished_requests():
            first.step_modern()
        first.stop_profiler()
        results["epochs"] = future.result(timeout=0).merge().policy_epoch
        first.release_followers()
    results["own version"] = engine.weight_version
    results["own epoch"] = engine._requests.generation_epoch
    ranks.close()
    return results


def stray(rank: int, sizes: ParallelSizes, port: int, path: Path) -> str:
    """A rank that has changed its schedule on its own."""
    ranks = join(sizes, rank, port, timeout=5.0)
    engine = build(path, ranks)
    if rank:
        engine.add_request(77, [1, 2, 3, 4, 5], SamplingParams(num_tokens_to_generate=4))
        engine.scheduler.schedule()
        engine.abort_request(77)
        engine.add_request(78, [1], SamplingParams(num_tokens_to_generate=4))
    return _error_of_serving(rank, engine, ranks)


def sample_another_token(rank: int, sizes: ParallelSizes, port: int, path: Path) -> str:
    """As on GPUs, one rank samples another token than the others."""
    use_collectives()
    ranks = join(sizes, rank, port, timeout=5.0)
    engine = build(path, ranks)
    if rank:

        def run(*args: Any, sample: Callable[..., StepOutput] = engine.controller.run) -> StepOutput:
            sampled = sample(*args)
            return replace(sampled, tokens=[token + 1 for token in sampled.tokens])

        setattr(engine.controller, "run", run)  # noqa: B010
    return _error_of_serving(rank, engine, ranks)


def _error_of_serving(rank: int, engine: DynamicInferenceEngine, ranks: Ranks) -> str:
    """What ends this rank while the first one serves."""
    try:
        if rank:
            run_follower(engine, ranks)
        else:
            serve(LockStepEngine(engine, ranks))
    except (LockStepError, LostRankError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def miss_suspension(rank: int, sizes: ParallelSizes, port: int, path: Path) -> str:
    """The last rank suspends too late."""
    ranks = join(sizes, rank, port, timeout=1.5)
    engine = build(path, ranks)
    try:
        if rank == sizes.ranks_per_replica_group - 1:
            engine.suspend = lambda: time.sleep(6.0)  # type: ignore[method-assign]
        if rank:
            run_follower(engine, ranks)
        else:
            LockStepEngine(engine, ranks).suspend()
    except LostRankError as error:
        return str(error)
    return "nothing"


def wait_idle(rank: int, sizes: ParallelSizes, port: int, path: Path) -> float:
    """CPU seconds that a rank uses in three seconds without a request."""
    ranks = join(sizes, rank, port)
    engine = build(path, ranks)
    first = LockStepEngine(engine, ranks) if rank == 0 else None
    before = time.process_time()
    if first is None:
        run_follower(engine, ranks)
        return time.process_time() - before
    time.sleep(3.0)
    first.release_followers()
    return time.process_time() - before


def adapt(rank: int, sizes: ParallelSizes, port: int, path: Path, folders: list[Path]) -> dict[str, Any]:
    """Adapters that are assigned, refused, replaced and unloaded while requests use them."""
    ranks = join(sizes, rank, port)
    engine = build(path, ranks)
    results: dict[str, Any] = {}
    if rank:
        with without_memory(at_call=2):
            run_follower(engine, ranks)
    else:
        first = LockStepEngine(engine, ranks)
        try:
            first.assign_adapters([AdapterEntry("large", str(folders[0]), 1)])
        except CheckpointError as error:
            results["shortage"] = str(error)
        names = [f"adapter {number}" for number in range(len(folders))]
        entries = [AdapterEntry(name, str(folder), 1) for name, folder in zip(names, folders, strict=True)]
        first.assign_adapters(entries)
        try:
            first.assign_adapters([*entries, AdapterEntry("missing", str(path / "nowhere"), 2)])
        except CheckpointError as error:
            results["error"] = str(error)
        params = [
            SamplingParams(num_tokens_to_generate=8, ignore_eos=True, temperature=0, adapter=a) for a in (*names, None)
        ]
        futures = [first.add_request(number, [1, 2, 3], each) for number, each in enumerate(params)]
        first.step_modern()
        first.assign_adapters([])
        while first.has_unfinished_requests():
            first.step_modern()
        results["answers"] = [future.result(timeout=0).merge().generated_tokens for future in futures]
        refused = first.add_request(9, [1, 2, 3], params[0]).result(timeout=0).merge()
        results["refused"] = refused.status.name
        first.release_followers()
    results["loaded"] = len(engine.controller.model.use_adapters())
    ranks.close()
    return results
