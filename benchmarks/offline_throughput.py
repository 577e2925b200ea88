"""Output tokens per second of an offline job: ours and its peers, in turn, in one run.

A random Llama of 110 million parameters, by default in float32; 32 prompts of 128 tokens, 128 greedy tokens each. Every
contender is a process with the Python of its own environment and with the model loaded. It computes the job once to
warm up, and then runs in turn with ours; the one that waits is stopped. Compare the ratios of the pairs; absolute
numbers apply to one machine only. README.md describes how to install the peers. With --gguf, ours and llama.cpp read
the same file, whose weights stay quantized in both.

    python benchmarks/offline_throughput.py                      # ours beside transformers' generate
    python benchmarks/offline_throughput.py --pairs 5 --threads 2 --dtype bfloat16 --peer vllm=/path/to/bin/python
    python benchmarks/offline_throughput.py --gguf model.gguf --prompts 1 --peer llama-cpp=/path/to/bin/python
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from peers.command_line import add_peer_option, listed, positive, print_table
from peers.process import ContenderError, ContenderProcess
from peers.protocol import Job
from peers.turns import ratio_cells

PEERS = ("transformers", "transformers-continuous", "llama-cpp", "onnxruntime-genai", "openvino-genai", "vllm")
MODELS: dict[str, dict[str, Any]] = {
    "110m": {"vocab_size": 32000, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12},
    "tiny": {"vocab_size": 500, "hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 2},
}
HEAD = 64
READS_GGUF = "llama-cpp"
"""The peer that reads GGUF files."""
FEWEST_TOKENS = 1000
"""A vocabulary of every GGUF file has so many."""


@dataclass(frozen=True)
class Pairs:
    """Results of ours and one peer."""

    peer: str
    versions: dict[str, str]
    ours: list[float]
    """Tokens per second, per pair."""
    theirs: list[float]
    agreement: float
    """Share of the tokens before the first difference of a prompt's answers."""

    def row(self) -> list[str]:
        ratios = [ours / theirs for ours, theirs in zip(self.ours, self.theirs, strict=True)]
        return [
            self.peer,
            f"{statistics.median(self.ours):.0f}",
            f"{statistics.median(self.theirs):.0f}",
            *ratio_cells(ratios),
            f"{self.agreement:.0%}",
            listed(self.versions),
        ]


COLUMNS = ["peer", "ours, tokens/s", "peer, tokens/s", "ratio ours / peer", "of the pairs", "same tokens", "versions"]


def write_checkpoint(folder: Path, model: str) -> None:
    """Writes a random Llama with transformers, and a minimal tokenizer, which is required but not used."""
    import torch
    from tokenizers import Tokenizer, decoders, models
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = MODELS[model]
    heads = shape["hidden_size"] // HEAD
    config = LlamaConfig(
        **shape,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    words = models.WordLevel({f"t{i}": i for i in range(shape["vocab_size"])}, unk_token="t0")
    tokenizer = Tokenizer(words)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "t2", "bos_token": "t1"}))


def make_prompts(count: int, length: int, vocabulary: int) -> list[list[int]]:
    """Token ids for all contenders, without the first three, which engines may treat as special."""
    return [[3 + (7919 * row + 104729 * column) % (vocabulary - 3) for column in range(length)] for row in range(count)]


def agreement(ours: list[list[int]], theirs: list[list[int]]) -> float:
    """Share of the tokens before the first difference in their row."""
    same = 0
    for one, other in zip(ours, theirs, strict=True):
        same += next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))
    return same / sum(map(len, ours))


def compare(ours: ContenderProcess, theirs: ContenderProcess, pairs: int) -> Pairs:
    """Runs theirs once to warm up, then the pairs."""
    theirs.run()
    speeds: tuple[list[float], list[float]] = ([], [])
    shares = []
    for pair in range(1, pairs + 1):
        turns = [contender.run() for contender in (ours, theirs)]
        for kept, (seconds, tokens) in zip(speeds, turns, strict=True):
            kept.append(sum(map(len, tokens)) / seconds)
        shares.append(agreement(turns[0][1], turns[1][1]))
        a, b = speeds[0][-1], speeds[1][-1]
        print(f"pair {pair}: ours {a:.0f} tokens/s, {theirs.name} {b:.0f} tokens/s, ratio {a / b:.2f}", flush=True)
    return Pairs(theirs.name, theirs.versions, *speeds, agreement=min(shares))


def compete(job: Job, peers: dict[str, str], pairs: int) -> tuple[list[Pairs], list[str]]:
    """Compares our engine with each peer; returns the results, and the reasons for peers without one."""
    measured, failures = [], []
    with ContenderProcess("ours", sys.executable, replace(job, work=job.work / "ours")) as ours:
        print(f"ours: {listed(ours.versions)}; {job.threads} threads, {job.dtype}", flush=True)
        ours.run()
        for name, python in peers.items():
            try:
                with ContenderProcess(name, python, replace(job, work=job.work / name)) as theirs:
                    measured.append(compare(ours, theirs, pairs))
            except (ContenderError, OSError) as error:
                failures.append(f"{name}: {error}")
    return measured, failures


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_peer_option(parser, PEERS)
    parser.add_argument("--pairs", type=positive, default=3)
    parser.add_argument("--threads", type=positive, default=len(os.sched_getaffinity(0)), help="of each contender")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16", "float16"], default="float32", help="data type of every contender"
    )
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--model", choices=MODELS, default="110m", help="tiny is for testing a peer")
    model.add_argument("--gguf", type=Path, help=f"a file for ours and {READS_GGUF}, which has its own --dtype")
    parser.add_argument("--prompts", type=positive, default=32)
    parser.add_argument("--prompt-tokens", type=positive, default=128)
    parser.add_argument("--new-tokens", type=positive, default=128, help="per prompt")
    chosen = parser.parse_args()
    if chosen.gguf is not None and {name for name, _ in chosen.peer or []} != {READS_GGUF}:
        parser.error(f"--gguf {chosen.gguf}: the only peer that reads it is --peer {READS_GGUF}=PYTHON")
    return chosen


def main() -> None:
    """Measures and prints each pair, then the table; exit status 1 if a peer could not be measured."""
    chosen = parse()
    with tempfile.TemporaryDirectory() as name:
        checkpoint, vocabulary = chosen.gguf, FEWEST_TOKENS
        if checkpoint is None:
            checkpoint, vocabulary = Path(name) / "checkpoint", MODELS[chosen.model]["vocab_size"]
            write_checkpoint(checkpoint, chosen.model)
        prompts = make_prompts(chosen.prompts, chosen.prompt_tokens, vocabulary)
        job = Job(checkpoint, Path(name), chosen.dtype, chosen.threads, prompts, chosen.new_tokens)
        peers = dict(chosen.peer or [("transformers", sys.executable)])
        measured, failures = compete(job, peers, chosen.pairs)
    if measured:
        print_table([COLUMNS, *(pairs.row() for pairs in measured)])
    for failure in failures:
        print(failure, file=sys.stderr)
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
