"""CPU time and latency of the coordinator: ours, Megatron's, and a Python program that only forwards messages.

Each contender has its coordinator in a separate process, four engines without a model, and its own client. The
contenders run in turn for each workload; those that wait are stopped. A turn keeps 64 requests outstanding, for the
requests per second and the CPU time of the coordinator's process, and then sends requests one after the other, for the
round trip. Compare the ratios; absolute numbers apply to one machine only. README.md describes how to install the peer.

    python benchmarks/coordinator.py                                   # ours beside the bare forwarder
    python benchmarks/coordinator.py --pairs 5 --peer megatron-core=/path/to/bin/python
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from coordinators.protocol import CoordinatorSetup, CoordinatorWorkload
from peers.command_line import add_peer_option, listed, positive, print_table
from peers.process import ContenderError, StoppedProcess
from peers.turns import ratio_cells, run_in_turn

PEERS = ("forwarder", "megatron-core")
WORKLOADS: dict[str, dict[str, int]] = {
    "128 tokens": {"prompt_tokens": 128},
    "128 tokens, prefix routing": {"prompt_tokens": 128, "prefix_routing": True},
    "2048 tokens": {"prompt_tokens": 2048},
    "2048 tokens, prefix routing": {"prompt_tokens": 2048, "prefix_routing": True},
    "streaming": {"prompt_tokens": 128, "streaming": True, "answer_tokens": 64, "round_trips": 0},
}
COLUMNS = [
    "workload",
    "coordinator",
    "requests/s",
    "CPU/request, us",
    "CPU/token, us",
    "round trip p50, ms",
    "p99, ms",
    "CPU ratio ours / it",
    "of the pairs",
]


@dataclass(frozen=True)
class CoordinatorTurn:
    """Results of one turn of a contender."""

    seconds: float
    cpu_seconds: float
    round_trips: list[float]
    """Seconds per request, one request at a time."""


class CoordinatorProcess(StoppedProcess):
    """A contender: its coordinator, engines and client."""

    def __init__(self, name: str, python: str, setup: CoordinatorSetup, folder: Path) -> None:
        super().__init__(name, python, f"coordinators.{name.replace('-', '_')}", folder / f"{name}.log", {})
        self._setup = setup
        self.versions: dict[str, str] = {}
        self.streams = True

    def _load(self) -> None:
        answer = self._ask("load", **asdict(self._setup))
        self.versions, self.streams = answer["versions"], answer["streams"]

    def run(self, workload: CoordinatorWorkload) -> CoordinatorTurn:
        """Runs one turn.

        Raises:
            ContenderError: It ended, for example after a wrong answer, or none within two minutes.
        """
        return CoordinatorTurn(**self._ask("run", **asdict(workload)))


def rows(title: str, workload: CoordinatorWorkload, turns: dict[str, list[CoordinatorTurn]]) -> list[list[str]]:
    """A row per contender; the others are compared with the first."""
    ours = next(iter(turns.values()))
    return [_row(title, name, workload, ours, theirs) for name, theirs in turns.items()]


def _row(
    title: str, name: str, workload: CoordinatorWorkload, ours: list[CoordinatorTurn], theirs: list[CoordinatorTurn]
) -> list[str]:
    ratios = [a.cpu_seconds / b.cpu_seconds for a, b in zip(ours, theirs, strict=True) if a is not b]
    cpu = statistics.median(turn.cpu_seconds for turn in theirs) / workload.requests * 1e6
    trips = sorted(trip * 1000 for turn in theirs for trip in turn.round_trips)
    return [
        title,
        name,
        f"{statistics.median(workload.requests / turn.seconds for turn in theirs):.0f}",
        f"{cpu:.1f}",
        f"{cpu / workload.answer_tokens:.1f}" if workload.streaming else "",
        f"{statistics.median(trips):.2f}" if trips else "",
        f"{trips[len(trips) * 99 // 100]:.2f}" if trips else "",
        *ratio_cells(ratios),
    ]


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_peer_option(parser, PEERS)
    parser.add_argument("--pairs", type=positive, default=3)
    parser.add_argument("--requests", type=positive, default=1000, help="requests per turn")
    parser.add_argument("--window", type=positive, default=64, help="outstanding requests")
    parser.add_argument("--round-trips", type=positive, default=200, help="requests per turn")
    parser.add_argument("--engines", type=positive, default=4)
    parser.add_argument("--block-size", type=positive, default=16, help="tokens per hashed block")
    parser.add_argument("--answer-tokens", type=positive, default=16, help="for workloads without streams")
    return parser.parse_args()


def main() -> None:
    """Measures each workload and prints the table; exit status 1 if a contender fails."""
    chosen = parse()
    setup = CoordinatorSetup(chosen.engines, chosen.block_size)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        names = {"ours": sys.executable, "forwarder": sys.executable, **dict(chosen.peer or [])}
        try:
            contenders = [
                stack.enter_context(CoordinatorProcess(name, python, setup, Path(folder)))
                for name, python in names.items()
            ]
            for contender in contenders:
                print(f"{contender.name}: {listed(contender.versions)}", flush=True)
            print_table([COLUMNS, *measure(contenders, chosen)])
        except (ContenderError, OSError) as error:
            sys.exit(str(error))


def measure(contenders: list[CoordinatorProcess], chosen: argparse.Namespace) -> list[list[str]]:
    """The rows of all workloads."""
    table = []
    for title, fields in WORKLOADS.items():
        workload = workload_of(chosen, fields)
        able = [contender for contender in contenders if contender.streams or not workload.streaming]
        turns = run_in_turn(able, chosen.pairs, partial(_run_afresh, workload))
        table += rows(title, workload, {contender.name: theirs for contender, theirs in turns.items()})
    return table


def _run_afresh(workload: CoordinatorWorkload, contender: CoordinatorProcess, pair: int) -> CoordinatorTurn:
    return contender.run(replace(workload, seed=pair))


def workload_of(chosen: argparse.Namespace, fields: Mapping[str, int]) -> CoordinatorWorkload:
    """The workload of the command line, with other values for some fields."""
    common = {
        "prefix_routing": False,
        "streaming": False,
        "answer_tokens": chosen.answer_tokens,
        "requests": chosen.requests,
        "window": chosen.window,
        "round_trips": chosen.round_trips,
        "seed": 0,
    }
    return CoordinatorWorkload(**{**common, **fields})  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
