"""Cost of scheduling: everything that the engine does per step except the model and sampling."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_runtime.config import InferenceConfig
from megatron_runtime.engine.context import DynamicInferenceContext, LogProbRows
from megatron_runtime.engine.dynamic_engine import DynamicInferenceEngine
from megatron_runtime.engine.sampling.sampling_table import SamplingRules
from megatron_runtime.engine.text_generation_controller import StepOutput, TextGenerationController
from megatron_runtime.model.checkpoint import load_model, load_tokenizer
from megatron_runtime.model.forward_batch import ForwardBatch
from megatron_runtime.model.hidden_pool import HiddenPool
from megatron_runtime.model.kv_cache import KVCache
from megatron_runtime.model.routing_tape import RoutingTape
from megatron_runtime.sampling_params import SamplingParams
from offline_throughput import make_prompts
from peers.turns import ratio_cells, run_in_turn

BLOCK = 16
PROMPT_TOKENS = 33
WARM_UP_STEPS = 5
SPARE_STEPS = 8
TOKEN = 7


class InstantController(TextGenerationController):
    """Returns at once, always with the same token."""

    def run(
        self,
        batch: ForwardBatch,
        kv_cache: KVCache,
        rules: SamplingRules,
        sampled_rows: torch.Tensor | None,
        wanted: LogProbRows | None,
        tape: RoutingTape | None = None,
        pool: HiddenPool | None = None,
    ) -> StepOutput:
        del kv_cache, rules, wanted, tape, pool
        return StepOutput([TOKEN] * len(batch.context_lengths if sampled_rows is None else sampled_rows), None)


class InFlight:
    """Requests that decode for at least ``steps`` steps."""

    def __init__(self, folder: Path, requests: int, steps: int, *, prefix_caching: bool) -> None:
        model = load_model(folder, dtype="float32")
        length = PROMPT_TOKENS + WARM_UP_STEPS + steps + SPARE_STEPS
        longest = length + 2 * BLOCK  # the free blocks that the scheduler requires to admit another request
        blocks = requests * -(-longest // BLOCK)
        config = InferenceConfig(
            block_size_tokens=BLOCK,
            kv_cache_memory_bytes=blocks * KVCache.block_bytes(model.config, BLOCK, model.dtype),
            max_requests=requests,
            max_tokens=requests * PROMPT_TOKENS,  # all begin within a few steps, and then decode together
            max_sequence_length=longest,
            enable_prefix_caching=prefix_caching,
        )
        context = DynamicInferenceContext(model.config, config, dtype=model.dtype, device=model.device)
        self.requests = requests
        self._engine = DynamicInferenceEngine(InstantController(model, load_tokenizer(folder)), context)
        params = SamplingParams(temperature=0, ignore_eos=True, num_tokens_to_generate=length - PROMPT_TOKENS)
        for number, prompt in enumerate(make_prompts(requests, PROMPT_TOKENS - BLOCK, model.config.vocab_size)):
            self._engine.add_request(number, [TOKEN] * BLOCK + prompt, params)  # all have the first block in common
        while self._engine.stats().waiting:
            self._engine.step_modern()
        for _ in range(WARM_UP_STEPS):
            self._engine.step_modern()

    def seconds(self, steps: int) -> float:
        """Seconds of a step with a token for every request: the minimum, because other load on the machine only adds
        time."""
        taken = []
        for _ in range(steps):
            started = time.perf_counter()
            result: Any = self._engine.step_modern()
            taken.append(time.perf_counter() - started)
            assert len(result["active_request_ids"]) == self.requests
        return min(taken)


def measure(
    folder: Path, counts: Sequence[int], steps: int, rounds: int, *, prefix_caching: bool
) -> dict[int, list[float]]:
    """Seconds of a step by requests in flight. The counts run in turn, so that other load on the machine affects
    all."""
    torch.set_num_threads(1)
    loads = [InFlight(folder, count, steps * rounds, prefix_caching=prefix_caching) for count in counts]
    taken = run_in_turn(loads, rounds, lambda load, _: load.seconds(steps))
    return {load.requests: seconds for load, seconds in taken.items()}


def rows(found: dict[int, list[float]]) -> list[list[str]]:
    """Requests in flight, the microseconds of a step and of a token, and the ratio to the row above."""
    table: list[list[str]] = []
    before: list[float] | None = None
    for requests, seconds in found.items():
        each = [second / requests for second in seconds]
        ratios = [] if before is None else [a / b for a, b in zip(each, before, strict=True)]
        table.append(
            [
                str(requests),
                f"{statistics.median(seconds) * 1e6:.0f}",
                f"{statistics.median(each) * 1e6:.2f}",
                *ratio_cells(ratios),
            ]
        )
        before = each
    return table
