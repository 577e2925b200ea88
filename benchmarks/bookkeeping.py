"""The host's time of a decode step on CUDA graphs, without the GPU: what it does beside launching, copying and waiting.

Schedules the pass, writes its inputs and those of its penalties, settles its tokens and reports them. The model and the
sampler are replaced by constant tokens; needs no GPU. Prints one table; exits with 1 if the fastest step of the most
requests takes longer than LIMIT.

    python benchmarks/bookkeeping.py
"""

from __future__ import annotations

import argparse
import gc
import itertools
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray

TESTS = Path(__file__).parent.parent / "tests" / "runtime"
sys.path[:0] = [str(TESTS), str(TESTS / "gpu")]  # their small model is also that of this program

from gpu_support.small_engine import random_decoder  # noqa: E402
from runtime_support.byte_backend import END, byte_backend  # noqa: E402

from megatron_runtime.config import InferenceConfig  # noqa: E402
from megatron_runtime.engine.context import DynamicInferenceContext  # noqa: E402
from megatron_runtime.engine.dynamic_engine import DynamicInferenceEngine  # noqa: E402
from megatron_runtime.engine.graph_inputs import GraphInputs, is_decode_pass  # noqa: E402
from megatron_runtime.engine.graph_sizes import GraphSize  # noqa: E402
from megatron_runtime.engine.packed_arrays import pack  # noqa: E402
from megatron_runtime.engine.sampling.gpu_edits import GpuEdits  # noqa: E402
from megatron_runtime.engine.sampling.sampling_table import SamplingRules  # noqa: E402
from megatron_runtime.engine.scheduling.sequence import SequenceSlice  # noqa: E402
from megatron_runtime.engine.text_generation_controller import StepOutput  # noqa: E402
from megatron_runtime.model.kv_cache import KVCache  # noqa: E402
from megatron_runtime.model.tokenizer import Tokenizer  # noqa: E402
from megatron_runtime.sampling_params import SamplingParams  # noqa: E402
from peers.command_line import positive, print_table  # noqa: E402
from ranks.scheduling import InstantController  # noqa: E402

LIMIT = 1e-3
"""Seconds of a step of the most requests."""
COUNTS = (1, 32, 128, 256)
TOKEN = 65
LENGTH = 1024
"""Tokens of a request."""
WARM_UP_STEPS = 20
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled, streamed": {"temperature": 0.8, "top_p": 0.9, "streaming": True},
    "sampled, streamed, penalized": {"temperature": 0.8, "frequency_penalty": 0.5, "streaming": True},
    "all penalties": {
        **{"temperature": 0.8, "top_p": 0.9, "streaming": True},
        **{"frequency_penalty": 0.5, "presence_penalty": 0.3, "repetition_penalty": 1.1},
    },
}


class HostGraphs:
    """Stands for PassGraphs: writes the inputs of a pass, and launches nothing."""

    def __init__(self, context: DynamicInferenceContext, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.sizes = [GraphSize(context.max_requests, context.max_requests)]
        self._inputs = GraphInputs(context.block_tables, context.max_requests, self.sizes[0])
        self._here = {name: np.zeros(count, dtype) for name, (dtype, count) in self._inputs.fields.items()}

    def size_for(self, slices: Sequence[SequenceSlice]) -> GraphSize | None:
        """All but prompts."""
        return self.sizes[0] if is_decode_pass(slices) else None

    def decode_size(self, requests: int) -> GraphSize:
        """That of all numbers."""
        del requests
        return self.sizes[0]

    def begin(
        self, slices: Sequence[SequenceSlice], size: GraphSize, rules: SamplingRules, sampled: Any = None
    ) -> HostPass:
        """The tokens of the pass."""
        self._inputs.write(self._here, slices, size, rules, sampled)
        if rules.changes_logits:
            pack(GpuEdits(rules, self._vocab_size).arrays, pin_memory=False)
        if rules.penalties is not None:
            rules.penalties.note_applied()
        return HostPass([TOKEN] * len(slices))


class HostPass(list[int]):
    """Stands for CapturedPass, and for the tokens that it samples."""

    def begin_sampling(self) -> HostPass:
        """These tokens."""
        return self

    def wait(self) -> NDArray[np.int64]:
        """They have arrived."""
        return np.array(self)


class InstantSampler(InstantController):
    """Takes the tokens of HostGraphs."""

    def run_captured(self, begun: Any, rules: SamplingRules, wanted: object) -> StepOutput:
        """These tokens."""
        del rules, wanted
        return StepOutput(begun, None)


def make_engine(requests: int, params: dict[str, Any]) -> DynamicInferenceEngine:
    """With as many requests, whose prompts are computed."""
    model = random_decoder(num_layers=1, max_position_embeddings=LENGTH)
    config = InferenceConfig(
        kv_cache_memory_bytes=requests * LENGTH // 16 * KVCache.block_bytes(model.config, 16, model.dtype),
        max_requests=requests,
        max_tokens=requests * LENGTH,
        max_sequence_length=LENGTH,
    )
    with (  # as on a GPU
        patch("megatron_runtime.engine.context_limits._SHARED_ROWS_ON_CPU", None),
        patch("megatron_runtime.engine.sampling.sampler.has_gpu_sampler", return_value=True),
    ):
        context = DynamicInferenceContext(model.config, config)
    tokenizer = Tokenizer(byte_backend(), location="bytes", eod=END)
    graphs = HostGraphs(context, model.config.vocab_size)
    with patch("megatron_runtime.engine.engine_memory.make_pass_graphs", return_value=graphs):
        engine = DynamicInferenceEngine(InstantSampler(model, tokenizer), context)
    for number in range(requests):
        given = params | {"ignore_eos": True, "num_tokens_to_generate": LENGTH // 2, "seed": number}
        engine.add_request(number, [65 + (number + at) % 50 for at in range(LENGTH // 4)], SamplingParams(**given))
    for _ in range(WARM_UP_STEPS):
        engine.step_modern()
    return engine


def seconds(engine: DynamicInferenceEngine, requests: int, steps: int) -> list[float]:
    """Of each step. Garbage of earlier measurements is not collected in them."""
    taken = []
    gc.collect()
    gc.freeze()
    for _ in range(steps):
        started = time.perf_counter()
        result = engine.step_modern()
        taken.append(time.perf_counter() - started)
        assert result["cuda_graph_request_count"] == len(result["active_request_ids"]) == requests
    return taken


def main() -> int:
    """0, or 1 if the limit is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=positive, default=200, help="steps of each measurement, at most 300")
    parser.add_argument("--rounds", type=positive, default=3, help="times that everything is measured")
    parser.add_argument("--requests", type=positive, nargs="+", default=COUNTS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[tuple[int, str], list[float]] = defaultdict(list)
    # A neighbour may slow the machine down for seconds, and so one round.
    for _, requests, name in itertools.product(range(given.rounds), given.requests, KINDS):
        found[requests, name] += seconds(make_engine(requests, KINDS[name]), requests, min(given.steps, 300))
    rows = [["requests", *(f"{name}: ms a step (fastest, median)" for name in KINDS)]]
    for requests in given.requests:
        taken = [found[requests, name] for name in KINDS]
        rows.append([str(requests), *(f"{min(each) * 1e3:.3f}, {median(each) * 1e3:.3f}" for each in taken)])
    print_table(rows)
    largest = max(given.requests)
    slow = [name for name in KINDS if min(found[largest, name]) > LIMIT]
    if slow:
        print(f"\nmore than {LIMIT * 1e3:g} ms with {largest} requests: {', '.join(slow)}")
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
