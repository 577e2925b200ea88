"""Time of the passes of an offline job by stage, on a CPU.

A random Llama of 110 million parameters, as in offline_throughput.py; every number is the mean of the fastest third of
the passes, so that other programs matter little. The stages are timed by hooks of modules, which cost some microseconds
each. Passes of few rows call no modules when they repeat recorded calls of kernels: "repeated" is the whole time of
such passes in the same jobs, which run in turn.

    python benchmarks/stages.py
    python benchmarks/stages.py --dtype float32 --threads 1
"""

from __future__ import annotations

import os
import sys

from megatron_runtime.launch.tasks import compute_environment

if missing := compute_environment():
    # The C library and OpenMP read their variables when a process starts.
    os.execve(sys.executable, sys.orig_argv, os.environ | missing)

import argparse
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megatron_runtime.apis import MegatronLLM
from megatron_runtime.config import InferenceConfig
from megatron_runtime.model.checkpoint import load_model, load_tokenizer
from megatron_runtime.model.decoder import Decoder
from megatron_runtime.model.head import Head
from megatron_runtime.model.layers import FeedForward
from megatron_runtime.model.packed_linear import PackedLinear, PanelLinear
from megatron_runtime.model.self_attention import SelfAttention
from megatron_runtime.sampling_params import SamplingParams
from offline_throughput import MODELS, make_prompts, write_checkpoint
from peers.command_line import positive, print_table

STAGES = ["products", "head", "attention", "activation", "norms, sums, Python"]
COLUMNS = ["pass", "passes", "whole, ms", *STAGES, "repeated"]
FASTEST = 1 / 3


@dataclass(frozen=True)
class Pass:
    """Seconds of one forward pass, by the kind of module; those of products in other modules count for both."""

    rows: int
    seconds: float
    kinds: Counter[str]

    def stages(self) -> list[float]:
        """Seconds of each stage."""
        kinds = self.kinds
        products = kinds["products"] - kinds["products in head"]
        attention = kinds["attention"] - kinds["products in attention"]
        activation = kinds["feed-forward"] - kinds["products in feed-forward"]
        measured = [products, kinds["head"], attention, activation]
        return [self.seconds, *measured, self.seconds - sum(measured)]


class Clock:
    """Times the modules of a decoder."""

    def __init__(self, decoder: Decoder) -> None:
        self.passes: list[Pass] = []
        self._kinds: Counter[str] = Counter()
        self._starts: list[float] = []
        self._within = ""
        for module in decoder.modules():
            if kind := _kind(module):
                module.register_forward_pre_hook(lambda *_, kind=kind: self._begin(kind))
                module.register_forward_hook(lambda *_, kind=kind: self._end(kind))
        decoder.register_forward_pre_hook(lambda *_: self._begin_pass())
        decoder.register_forward_hook(lambda _, given, __: self._end_pass(len(given[0].positions)))

    def _begin(self, kind: str) -> None:
        if kind != "products":
            self._within = kind
        self._starts.append(time.perf_counter())

    def _end(self, kind: str) -> None:
        seconds = time.perf_counter() - self._starts.pop()
        self._kinds[kind] += seconds
        if kind == "products":
            self._kinds[f"products in {self._within}"] += seconds

    def take(self) -> list[Pass]:
        """The passes since the last call."""
        taken, self.passes = self.passes, []
        return taken

    def _begin_pass(self) -> None:
        self._kinds = Counter()
        self._starts = [time.perf_counter()]

    def _end_pass(self, rows: int) -> None:
        self.passes.append(Pass(rows, time.perf_counter() - self._starts.pop(), self._kinds))


def _kind(module: nn.Module) -> str:
    kinds = {
        "products": (PackedLinear, PanelLinear),
        "attention": SelfAttention,
        "feed-forward": FeedForward,
        "head": Head,
    }
    return next((name for name, types in kinds.items() if isinstance(module, types)), "")


def row(name: str, passes: Sequence[Pass], repeated: Sequence[Pass]) -> list[str]:
    """Of the table."""
    stages = zip(*(each.stages() for each in _fastest(passes)), strict=True)
    columns = [*stages, [each.seconds for each in _fastest(repeated)]]
    return [name, str(len(passes)), *(f"{1000 * statistics.mean(each):.2f}" for each in columns)]


def _fastest(passes: Sequence[Pass]) -> list[Pass]:
    return sorted(passes, key=lambda each: each.seconds)[: max(1, round(len(passes) * FASTEST))]


def measure(chosen: argparse.Namespace, folder: Path) -> tuple[list[Pass], list[Pass]]:
    """The passes of some jobs that call modules, and of as many that repeat recorded calls, after two to warm up."""
    write_checkpoint(folder, chosen.model)
    decoder: Any = load_model(folder, dtype=chosen.dtype)
    length = chosen.prompt_tokens + chosen.new_tokens
    config = InferenceConfig(kv_cache_memory_bytes=1 << 30, max_requests=chosen.prompts, max_sequence_length=length)
    llm = MegatronLLM(model=decoder, tokenizer=load_tokenizer(folder), inference_config=config)
    prompts = make_prompts(chosen.prompts, chosen.prompt_tokens, MODELS[chosen.model]["vocab_size"])
    params = SamplingParams(temperature=0, num_tokens_to_generate=chosen.new_tokens, ignore_eos=True)
    recordings = decoder.recorded_layers
    for _ in range(2):
        llm.generate(prompts, params)
    clock, calling, repeating = Clock(decoder), [], []
    for _ in range(chosen.rounds):
        for decoder.recorded_layers, passes in ((None, calling), (recordings, repeating)):
            llm.generate(prompts, params)
            passes += clock.take()
    return calling, repeating


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--threads", type=positive, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--model", choices=MODELS, default="110m")
    parser.add_argument("--prompts", type=positive, default=32)
    parser.add_argument("--prompt-tokens", type=positive, default=128)
    parser.add_argument("--new-tokens", type=positive, default=128)
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    with tempfile.TemporaryDirectory() as name:
        calling, repeating = measure(chosen, Path(name))
    largest = max(each.rows for each in calling)
    kinds = {f"{largest} tokens of prompts": largest, f"{chosen.prompts} next tokens": chosen.prompts}
    rows = []
    for name, count in kinds.items():
        called, repeated = ([each for each in passes if each.rows == count] for passes in (calling, repeating))
        # Prompts that take several passes may end before all are in one.
        if called and repeated:
            rows.append(row(name, called, repeated))
    print_table([COLUMNS, *rows])


if __name__ == "__main__":
    main()
