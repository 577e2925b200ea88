"""What a frontend process costs: ours beside a bare FastAPI and uvicorn that answers the same bodies, and peers.

Behind ours are our coordinator and an engine without a model, which answers at once; behind the bare one is nothing.
Clients are in other processes, as are the coordinator and the engine: what counts is the CPU of the frontend's process
alone. The two take turns, workload by workload; README.md beside this file says how to read the table.

    python benchmarks/frontend.py
    python benchmarks/frontend.py --pairs 5 --window 64 --peer vllm=/path/to/bin/python
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from frontends.protocol import Workload
from peers.command_line import add_peer_option, listed, positive, print_table
from peers.process import ContenderError, StoppedProcess
from peers.turns import ratio_cells, take_turns

CONTENDERS = ("ours", "bare")
PEERS = ("vllm",)
COLUMNS = [
    "workload",
    "frontend",
    "requests/s",
    "CPU/request, us",
    "CPU/token, us",
    "tokens/event",
    "CPU ratio ours / it",
    "of the pairs",
]


@dataclass(frozen=True)
class Turn:
    """One turn of one contender."""

    seconds: float
    cpu_seconds: float
    events: int
    """Those that have tokens, over all streams."""


class FrontendProcess(StoppedProcess):
    """A contender with its frontend, what is behind it, and its clients."""

    def __init__(self, name: str, folder: Path, python: str = sys.executable) -> None:
        super().__init__(name, python, f"frontends.{name}", folder / f"{name}.log", {})
        self.versions: dict[str, str] = {}

    def _load(self) -> None:
        self.versions = self._ask("load")["versions"]

    def run(self, workload: Workload) -> Turn:
        """One turn.

        Raises:
            ContenderError: It ended; a wrong answer or none within two minutes are reasons.
        """
        return Turn(**self._ask("run", **asdict(workload)))


def rows(title: str, workload: Workload, turns: dict[str, list[Turn]]) -> list[list[str]]:
    """A row of the table for each contender; the first is what the others are compared with."""
    ours = next(iter(turns.values()))
    return [_row(title, name, workload, ours, theirs) for name, theirs in turns.items()]


def _row(title: str, name: str, workload: Workload, ours: list[Turn], theirs: list[Turn]) -> list[str]:
    ratios = [a.cpu_seconds / b.cpu_seconds for a, b in zip(ours, theirs, strict=True) if a is not b]
    cpu = statistics.median(turn.cpu_seconds for turn in theirs) / workload.requests * 1e6
    tokens = workload.requests * workload.answer_tokens
    return [
        title,
        name,
        f"{statistics.median(workload.requests / turn.seconds for turn in theirs):.0f}",
        f"{cpu:.0f}",
        f"{cpu / workload.answer_tokens:.1f}" if workload.streaming else "",
        f"{statistics.median(tokens / turn.events for turn in theirs):.2f}" if workload.streaming else "",
        *ratio_cells(ratios),
    ]


def workloads(chosen: argparse.Namespace) -> dict[str, Workload]:
    """By title."""
    common: dict[str, Any] = {"prompt_sentences": chosen.prompt_sentences, "window": chosen.window}
    at_once = {**common, "streaming": False, "answer_tokens": 16, "requests": chosen.requests}
    streamed = {**common, "streaming": True, "answer_tokens": chosen.stream_tokens, "requests": chosen.streams}
    return {
        f"{kind}{way}": Workload(chat=kind == "chat", **fields)
        for way, fields in (("", at_once), (", streamed", streamed))
        for kind in ("chat", "completion")
    }


def _run(workload: Workload, contender: FrontendProcess, _: int) -> Turn:
    return contender.run(workload)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=positive, default=5)
    parser.add_argument("--requests", type=positive, default=1000, help="of a turn that streams nothing")
    parser.add_argument("--streams", type=positive, default=64, help="of a turn that streams")
    parser.add_argument("--stream-tokens", type=positive, default=128, help="of each stream")
    parser.add_argument("--window", type=positive, default=32, help="requests that are outstanding at any time")
    parser.add_argument("--prompt-sentences", type=positive, default=6, help="of 16 tokens or 76 bytes each")
    add_peer_option(parser, PEERS)
    return parser.parse_args()


def main() -> None:
    """Measure each workload and print the table; exit status 1 if a contender fails."""
    chosen = parse()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        try:
            pythons = dict.fromkeys(CONTENDERS, sys.executable) | dict(chosen.peer or [])
            contenders = [
                stack.enter_context(FrontendProcess(name, Path(folder), python)) for name, python in pythons.items()
            ]
            for contender in contenders:
                print(f"{contender.name}: {listed(contender.versions)}", flush=True)
            table = [COLUMNS]
            for title, workload in workloads(chosen).items():
                turns = take_turns(contenders, chosen.pairs, partial(_run, workload))
                table += rows(title, workload, {contender.name: theirs for contender, theirs in turns.items()})
            print_table(table)
            print(f"load of the machine at the end: {os.getloadavg()[0]:.1f} on {len(os.sched_getaffinity(0))} cores")
        except (ContenderError, OSError) as error:
            sys.exit(str(error))


if __name__ == "__main__":
    main()
