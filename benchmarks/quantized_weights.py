"""Quantized weights of a checkpoint, such as a GGUF file, kept and expanded to bfloat16, compared on a CPU.

Everything is measured in turn, and compared pair by pair; absolute numbers apply to one machine only.

    python benchmarks/quantized_weights.py                                     # all parts, with SmolLM2
    python benchmarks/quantized_weights.py --part perplexity --texts docs/*.md
    python benchmarks/quantized_weights.py --part memory --random Q4_K         # a larger model
"""

from __future__ import annotations

import argparse
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch

from megatron_runtime.apis import MegatronLLM
from megatron_runtime.config import InferenceConfig
from megatron_runtime.launch.sample_model import MODEL, models_folder
from megatron_runtime.model.checkpoint import load_model, load_tokenizer
from megatron_runtime.model.formats.coded_rows import CODINGS, CodedRows
from megatron_runtime.model.packed_linear import PackedLinear
from megatron_runtime.model.quantized.linear import QuantizedLinear
from megatron_runtime.model.quantized.matrix import QuantizedMatrix
from megatron_runtime.sampling_params import SamplingParams
from peers.command_line import positive, print_table
from peers.turns import ratio_cells, run_in_turn
from random_gguf import random_rows, write_random_gguf

CHOICES = ("keep", "expand")
KINDS = ("Q4_0", "Q4_1", "Q5_K", "Q6_K", "Q8_0")
"""A type for each layout; Q4_K has that of Q4_1."""
ROWS = (1, 8, 32, 128, 512)
JOBS = {"decode, 1 request": (1, 16, 64), "decode, 8": (8, 16, 64), "decode, 32": (32, 16, 64), "prefill": (1, 1024, 1)}
"""Requests, tokens of a prompt, new tokens."""
WINDOW = 512
"""Tokens that the perplexity of a token may depend on, with those before it in the window."""
MEASURE_LOAD = """
import re, sys, time
from pathlib import Path
import torch
from megatron_runtime.model.checkpoint import load_model
path, choice, threads = sys.argv[1:]
torch.set_num_threads(int(threads))
other = load_model(path, quantized_weights=choice)
Path("/proc/self/clear_refs").write_text("5")
status = Path("/proc/self/status").read_text
before, started = int(re.search(r"VmRSS:\\s+(\\d+)", status())[1]), time.perf_counter()
model = load_model(path, quantized_weights=choice)
seconds = time.perf_counter() - started
after, peak = (int(re.search(rf"{name}:\\s+(\\d+)", status())[1]) for name in ("VmRSS", "VmHWM"))
print(seconds, (after - before) * 1024, (peak - before) * 1024)
"""
"""Of a second model, so that libraries and kernels are loaded."""


def main() -> None:
    """Run the chosen parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, nargs="+", default=list(PARTS))
    parser.add_argument("--model", type=Path, default=models_folder() / MODEL, help="a GGUF file or a folder")
    parser.add_argument(
        "--random",
        choices=CODINGS,
        help="instead of the model, in the part of memory: a Llama of random weights of this type",
    )
    parser.add_argument("--layers", type=positive, default=16, help="of this Llama")
    parser.add_argument("--pairs", type=positive, default=5)
    parser.add_argument("--threads", type=positive, default=torch.get_num_threads())
    parser.add_argument(
        "--width", type=positive, default=2048, help="columns of the matrix of the products; of this Llama"
    )
    parser.add_argument("--height", type=positive, default=4096, help="its rows")
    parser.add_argument("--texts", type=Path, nargs="+", default=[Path(__file__).parent.parent / "LICENSE"])
    parser.add_argument("--tokens", type=positive, default=2048, help="of each text, for the perplexity")
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    for part in chosen.part:
        with torch.inference_mode():
            PARTS[part](chosen)


def products(chosen: argparse.Namespace) -> None:
    """Products with one matrix, for a few rows and for many."""
    torch.manual_seed(0)
    dense = PackedLinear(torch.randn(chosen.height, chosen.width, dtype=torch.bfloat16))
    rows = [["type", "rows", "speed, kept / bfloat16", "of the pairs"]]
    for kind in KINDS:
        quantized = QuantizedLinear([_random_matrix(kind, chosen.height, chosen.width)], None, torch.bfloat16)
        for count in ROWS:
            inputs = torch.randn(count, chosen.width, dtype=torch.bfloat16)
            runs = [partial(each, inputs) for each in (quantized, dense)]
            ratios = _ratios(runs, 3 * chosen.pairs, max(1, 400 // count))
            rows.append([kind, str(count), *ratio_cells(ratios)])
    print_table(rows)


def engine(chosen: argparse.Namespace) -> None:
    """Tokens per second of the whole engine."""
    rows = [["job", "speed, kept / bfloat16", "of the pairs"]]
    random = np.random.default_rng(0)
    config = InferenceConfig(kv_cache_memory_bytes=1 << 30, max_sequence_length=2048, enable_prefix_caching=False)
    models = [load_model(chosen.model, quantized_weights=choice) for choice in CHOICES]
    tokenizer = load_tokenizer(chosen.model)
    for name, (requests, length, new) in JOBS.items():
        params = SamplingParams(temperature=0, num_tokens_to_generate=new, ignore_eos=True)
        prompts = random.integers(1000, 2000, (requests, length)).tolist()
        engines = [MegatronLLM(model=model, tokenizer=tokenizer, inference_config=config) for model in models]
        runs = [partial(each.generate, prompts, params) for each in engines]
        rows.append([name, *ratio_cells(_ratios(runs, chosen.pairs, 1))])
        for each in engines:
            each.shutdown()
    print_table(rows)


def memory(chosen: argparse.Namespace) -> None:
    """Time and memory of loading, beside reading the file."""
    if chosen.random is not None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"{chosen.random}.gguf"
            write_random_gguf(path, chosen.random, width=chosen.width, layers=chosen.layers)
            _memory(path, chosen)
    else:
        _memory(chosen.model, chosen)


def _memory(model: Path, chosen: argparse.Namespace) -> None:
    size = model.stat().st_size
    rows = [["weights", "memory / file", "peak / file", "time / time to read the cached file"]]

    def load(choice: str, _: int) -> list[float]:
        command = [sys.executable, "-c", MEASURE_LOAD, str(model), choice, str(chosen.threads)]
        done = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        started = time.perf_counter()
        model.read_bytes()
        return [*map(float, done.split()), time.perf_counter() - started]

    for choice, turns in run_in_turn(CHOICES, chosen.pairs, load).items():
        held, peak, reading = (statistics.median(column) for column in zip(*_load_ratios(turns, size), strict=True))
        rows.append([choice, f"{held:.2f}", f"{peak:.2f}", f"{reading:.1f}"])
    print_table(rows)


def _load_ratios(turns: Sequence[Sequence[float]], size: int) -> Iterator[tuple[float, float, float]]:
    for seconds, held, peak, reading in turns:
        yield held / size, peak / size, seconds / reading


def perplexity(chosen: argparse.Namespace) -> None:
    """Perplexity in windows of a text, compared with the expanded float32 weights."""
    variants = [("float32", "expand"), ("bfloat16", "expand"), ("float32", "keep"), ("bfloat16", "keep")]
    tokenizer, changes = load_tokenizer(chosen.model), []
    engines = {}
    for dtype, choice in variants:
        model = load_model(chosen.model, dtype=dtype, quantized_weights=choice)
        engines[dtype, choice] = MegatronLLM(model=model, tokenizer=tokenizer)
    for text in chosen.texts:
        tokens = tokenizer.tokenize(text.read_text(encoding="utf-8"))[: chosen.tokens]
        losses = [_loss(each, tokens) for each in engines.values()]
        changes.append([100 * (math.exp(loss - losses[0]) - 1) for loss in losses[1:]])
    rows = [["weights", f"perplexity, % (mean of {len(changes)} texts)", "standard error"]]
    for (dtype, choice), column in zip(variants[1:], zip(*changes, strict=True), strict=True):
        error = statistics.stdev(column) / math.sqrt(len(column)) if len(column) > 1 else math.nan
        rows.append([f"{choice}, {dtype}", f"{statistics.mean(column):+.2f}", f"{error:.2f}"])
    print_table(rows)


def _loss(llm: MegatronLLM, tokens: list[int]) -> float:
    """The mean negative log probability of the tokens."""
    params = SamplingParams(num_tokens_to_generate=1, return_log_probs=True, skip_prompt_log_probs=False)
    windows = [tokens[start : start + WINDOW] for start in range(0, len(tokens), WINDOW)]
    answers = llm.generate([window for window in windows if len(window) > 1], params)
    return -statistics.fmean(value for answer in answers for value in answer.prompt_log_probs)


def _random_matrix(kind: str, rows: int, columns: int) -> QuantizedMatrix:
    matrix = QuantizedMatrix(rows, columns, CODINGS[kind])
    matrix.fill(0, CodedRows.of(kind, random_rows(kind, rows, columns)))
    return matrix


def _ratios(runs: Sequence[Callable[[], object]], pairs: int, times: int) -> list[float]:
    """Of each pair, the time of the second run divided by that of the first; after one run of each."""

    def take(run: Callable[[], object], _: int) -> float:
        started = time.perf_counter()
        for _ in range(times):
            run()
        return time.perf_counter() - started

    ours, theirs = run_in_turn(runs, pairs + 1, take).values()
    return [their / our for our, their in zip(ours[1:], theirs[1:], strict=True)]


PARTS = {"products": products, "engine": engine, "memory": memory, "perplexity": perplexity}


if __name__ == "__main__":
    main()
