"""Cost of a batch whose requests have different LoRA adapters, compared with the same batch without adapters.

A random Llama of 110 million parameters, and adapters of all linear modules. One engine computes the job without
adapters and with them in turn; request number i has adapter i modulo the number of adapters. The time of prompts and
that of decode steps are separate. Times are those of the processor, so that other load matters less. Compare the
ratios; absolute numbers apply to one machine only.

    python benchmarks/lora.py
    python benchmarks/lora.py --dtype bfloat16 --rank 16 --threads 2
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file

from megatron_runtime.config import InferenceConfig
from megatron_runtime.engine.dynamic_engine import DynamicInferenceEngine
from megatron_runtime.model.checkpoint import load_model, load_tokenizer
from megatron_runtime.sampling_params import SamplingParams
from offline_throughput import MODELS, make_prompts, write_checkpoint
from peers.command_line import positive, print_table
from peers.turns import ratio_cells

COLUMNS = ["requests", "phase", "base, tokens/CPU s", "adapters, tokens/CPU s", "ratio of the times", "of the pairs"]
LINEAR = {"self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"), "mlp": ("gate_proj", "up_proj", "down_proj")}


class Seconds(NamedTuple):
    """Of one job."""

    prompts: float
    """Of a job in which each request has one new token."""
    decode: float
    """Of the steps for the others."""


def write_adapter(folder: Path, model: str, rank: int, seed: int) -> Path:
    """Writes an adapter of all linear modules, in the files of peft."""
    folder.mkdir()
    shape, noise = MODELS[model], torch.Generator().manual_seed(seed)
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(shape["num_hidden_layers"]):
        for block, modules in LINEAR.items():
            for module in modules:
                width = inner if module == "down_proj" else hidden
                height = inner if module in ("gate_proj", "up_proj") else hidden
                name = f"base_model.model.model.layers.{layer}.{block}.{module}"
                tensors[f"{name}.lora_A.weight"] = torch.randn(rank, width, generator=noise) * 0.01
                tensors[f"{name}.lora_B.weight"] = torch.randn(height, rank, generator=noise) * 0.01
    save_file(tensors, folder / "adapter_model.safetensors")
    targets = [module for modules in LINEAR.values() for module in modules]
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": targets, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def make_engine(folder: Path, chosen: argparse.Namespace) -> DynamicInferenceEngine:
    """An engine with all adapters, named by their numbers."""
    write_checkpoint(folder / "model", chosen.model)
    model = load_model(folder / "model", dtype=chosen.dtype)
    config = InferenceConfig(buffer_size_gb=1, max_loras=chosen.adapters, max_lora_rank=max(chosen.rank, 64))
    engine = DynamicInferenceEngine.build(model, load_tokenizer(folder / "model"), config)
    for number in range(chosen.adapters):
        adapter = write_adapter(folder / str(number), chosen.model, chosen.rank, number)
        engine.adapters.load(str(number), adapter)
    return engine


def run(engine: DynamicInferenceEngine, prompts: list[list[int]], new_tokens: int, adapters: int) -> Seconds:
    """A job with one new token per request, and the whole job; without adapters if ``adapters`` is 0."""
    names = [str(index % adapters) if adapters else None for index in range(len(prompts))]
    times = []
    for count in (1, new_tokens):
        params = [
            SamplingParams(temperature=0, num_tokens_to_generate=count, ignore_eos=True, adapter=a) for a in names
        ]
        start = time.process_time()
        engine.generate(prompts, params)
        times.append(time.process_time() - start)
    return Seconds(times[0], times[1] - times[0])


def measure(engine: DynamicInferenceEngine, requests: int, chosen: argparse.Namespace) -> list[list[str]]:
    """The rows of the table for one number of requests."""
    prompts = make_prompts(requests, chosen.prompt_tokens, MODELS[chosen.model]["vocab_size"])
    kinds = (0, chosen.adapters)
    for adapters in kinds:
        run(engine, prompts, 2, adapters)
    pairs = [[run(engine, prompts, chosen.new_tokens, adapters) for adapters in kinds] for _ in range(chosen.pairs)]
    rows = []
    for phase, tokens in (("prompts", chosen.prompt_tokens), ("decode", chosen.new_tokens - 1)):
        times = [[getattr(seconds, phase) for seconds in pair] for pair in pairs]
        speeds = [requests * tokens / statistics.median(each) for each in zip(*times, strict=True)]
        ratios = [adapted / base for base, adapted in times]
        rows.append([str(requests), phase, *(f"{speed:.0f}" for speed in speeds), *ratio_cells(ratios)])
    return rows


def parse() -> Any:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=positive, default=5)
    parser.add_argument("--threads", type=positive, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--model", choices=MODELS, default="110m", help="tiny is for testing the program")
    parser.add_argument("--adapters", type=positive, default=8)
    parser.add_argument("--rank", type=positive, default=8)
    parser.add_argument("--requests", type=positive, nargs="+", default=[8, 32])
    parser.add_argument("--prompt-tokens", type=positive, default=128)
    parser.add_argument("--new-tokens", type=positive, default=64, help="per request")
    return parser.parse_args()


def main() -> None:
    """Measures and prints the table."""
    chosen = parse()
    torch.set_num_threads(chosen.threads)
    with tempfile.TemporaryDirectory() as name:
        engine = make_engine(Path(name), chosen)
        print(f"{chosen.adapters} adapters of rank {chosen.rank}, {chosen.dtype}, {chosen.threads} threads", flush=True)
        rows = [row for requests in chosen.requests for row in measure(engine, requests, chosen)]
    print_table([COLUMNS, *rows])


if __name__ == "__main__":
    main()
