"""Speedup of several ranks on this machine, their communication time, and the cost of scheduling.

First the scheduling: everything that the engine does per step except the model and sampling, with 1 to 1024 requests in
flight. Then a random Llama of 110 million parameters on 1, 2 and 4 ranks, with tensor or pipeline parallelism. Each
replica group computes the job once to warm up, and then runs in turn with the others; those that wait are stopped. The
ranks of a group share the cores: each has cores / ranks threads, at least one. Compare the ratios to the single rank of
the same round; absolute numbers apply to one machine only.

    python benchmarks/scaling.py
    python benchmarks/scaling.py --rounds 5 --group tensor=2 --group tensor=2,pipeline=2
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from offline_throughput import MODELS, make_prompts, write_checkpoint
from peers.command_line import listed, positive, print_table
from peers.process import ContenderError, StoppedProcess
from peers.turns import ratio_cells, run_in_turn
from ranks import scheduling

IN_FLIGHT = (1, 4, 16, 64, 256, 1024)
GROUPS = ({"tensor": 2}, {"tensor": 4}, {"pipeline": 2}, {"pipeline": 4})
SCHEDULING = ["requests in flight", "step, us", "token, us", "ratio to the row above", "of the rounds"]
RANKS = [
    "ranks",
    "threads each",
    "tokens/s",
    "ratio to 1 rank",
    "of the rounds",
    "in communication",
    "most of it in",
    "same tokens",
]


@dataclass(frozen=True)
class GroupTurn:
    """Results of one job of a group."""

    seconds: float
    tokens: list[list[int]]
    communication: list[dict[str, float]]
    """Seconds per rank, by communication call."""

    @property
    def speed(self) -> float:
        """Output tokens per second."""
        return sum(map(len, self.tokens)) / self.seconds

    @property
    def share(self) -> float:
        """Share of the ranks' time spent in communication."""
        return statistics.mean(sum(rank.values()) for rank in self.communication) / self.seconds


class RankGroup(StoppedProcess):
    """A replica group."""

    def __init__(self, sizes: dict[str, int], folder: Path, chosen: argparse.Namespace) -> None:
        self.sizes = {"tensor": 1, "pipeline": 1, **sizes}
        ranks = self.sizes["tensor"] * self.sizes["pipeline"]
        self.threads = max(chosen.cores // ranks, 1)
        threads = dict.fromkeys(("OMP_NUM_THREADS", "NUMBA_NUM_THREADS"), str(self.threads))
        title = ", ".join(f"{name} {size}" for name, size in sizes.items()) or "1"
        super().__init__(title, sys.executable, "ranks.group", folder / f"{title}.log", threads)
        self._folder, self._chosen = folder, chosen
        self._job = {
            "prompts": make_prompts(chosen.requests, chosen.prompt_tokens, MODELS[chosen.model]["vocab_size"]),
            "new_tokens": chosen.new_tokens,
        }
        self.versions: dict[str, str] = {}

    def _load(self) -> None:
        setup = {
            "folder": self._folder / "checkpoint",
            "dtype": self._chosen.dtype,
            "threads": self.threads,
            "requests": self._chosen.requests,
            "longest": self._chosen.prompt_tokens + self._chosen.new_tokens,
        }
        self.versions = self._ask("load", **self.sizes, **setup)["versions"]
        self.run()

    def run(self) -> GroupTurn:
        """Runs one turn.

        Raises:
            ContenderError: A rank ended.
        """
        return GroupTurn(**self._ask("run", **self._job))


def rows(turns: dict[RankGroup, list[GroupTurn]]) -> list[list[str]]:
    """A row per group; the others are compared with the first, which is a single rank."""
    return [_row(group, next(iter(turns.values())), theirs) for group, theirs in turns.items()]


def _row(group: RankGroup, alone: list[GroupTurn], turns: list[GroupTurn]) -> list[str]:
    ratios = [turn.speed / one.speed for turn, one in zip(turns, alone, strict=True) if turn is not one]
    spent = sum((Counter(rank) for turn in turns for rank in turn.communication), Counter[str]())
    is_alone = turns is alone
    same = sum(a == b for a, b in zip(turns[0].tokens, alone[0].tokens, strict=True)) / len(alone[0].tokens)
    return [
        group.name,
        str(group.threads),
        f"{statistics.median(turn.speed for turn in turns):.0f}",
        *ratio_cells(ratios),
        f"{statistics.median(turn.share for turn in turns):.0%}",
        "" if is_alone else spent.most_common(1)[0][0],
        "" if is_alone else f"{same:.0%}",
    ]


def sizes_of(text: str) -> dict[str, int]:
    """``tensor=2,pipeline=2`` as a mapping."""
    pairs = [part.partition("=") for part in text.split(",")]
    if any(name not in ("tensor", "pipeline") for name, _, _ in pairs):
        raise argparse.ArgumentTypeError(f"{text!r}: use tensor=N, pipeline=N, or tensor=N,pipeline=N")
    return {name: positive(size) for name, _, size in pairs}


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument(
        "--group", type=sizes_of, action="append", metavar="SIZES", help="repeatable: tensor=N, pipeline=N, or both"
    )
    parser.add_argument(
        "--cores", type=positive, default=len(os.sched_getaffinity(0)), help="cores that a group may use"
    )
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--model", choices=MODELS, default="110m", help="tiny is for testing")
    parser.add_argument("--requests", type=positive, default=16)
    parser.add_argument("--prompt-tokens", type=positive, default=64)
    parser.add_argument("--new-tokens", type=positive, default=32, help="per request")
    parser.add_argument(
        "--most-in-flight", type=positive, default=IN_FLIGHT[-1], help="maximum for the measurement of scheduling"
    )
    parser.add_argument("--steps", type=positive, default=32, help="steps per round in the measurement of scheduling")
    return parser.parse_args()


def main() -> None:
    """Measures and prints both tables; exit status 1 if a rank fails."""
    chosen = parse()
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        measure_scheduling(folder / "tiny", chosen)
        write_checkpoint(folder / "checkpoint", chosen.model)
        try:
            groups = [RankGroup(sizes, folder, chosen) for sizes in ({}, *(chosen.group or GROUPS))]
            for group in groups:
                stack.enter_context(group)
            print(f"\n{listed(groups[0].versions)}; {chosen.cores} cores, {chosen.dtype}", flush=True)
            print_table([RANKS, *rows(run_in_turn(groups, chosen.rounds, lambda group, _: group.run()))])
        except (ContenderError, OSError) as error:
            sys.exit(str(error))


def measure_scheduling(folder: Path, chosen: argparse.Namespace) -> None:
    """Prints the cost of steps without a model, with and without the prefix cache."""
    write_checkpoint(folder, "tiny")
    counts = [count for count in IN_FLIGHT if count <= chosen.most_in_flight]
    for is_on in (False, True):
        found = scheduling.measure(folder, counts, chosen.steps, chosen.rounds, prefix_caching=is_on)
        print(f"\nscheduling {'with' if is_on else 'without'} the prefix cache", flush=True)
        print_table([SCHEDULING, *scheduling.rows(found)])


if __name__ == "__main__":
    main()
