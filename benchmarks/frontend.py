"""CPU time of a frontend process: ours, a bare FastAPI and uvicorn application with the same bodies, and peers.

Our frontend has a coordinator and an engine without a model, which answers at once; the bare application has nothing
behind it. Clients, coordinator and engine are in other processes: only the CPU time of the frontend's process is
measured. The contenders run in turn for each workload; README.md describes how to read the table.

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

from frontends.protocol import FrontendWorkload
from peers.command_line import add_peer_option, listed, positive, print_table
from peers.process import ContenderError, StoppedProcess
from peers.turns import ratio_cells, run_in_turn

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
class FrontendTurn:
    """Results of one turn of a contender."""

    seconds: float
    cpu_seconds: float
    events: int
    """Events with tokens, of all streams."""


class FrontendProcess(StoppedProcess):
    """A contender: its frontend, its backend, and its clients."""

    def __init__(self, name: str, folder: Path, python: str = sys.executable) -> None:
        super().__init__(name, python, f"frontends.{name}", folder / f"{name}.log", {})
        self.versions: dict[str, str] = {}

    def _load(self) -> None:
        self.versions = self._ask("load")["versions"]

    def run(self, workload: FrontendWorkload) -> FrontendTurn:
        """Runs one turn.

        Raises:
            ContenderError: It ended, for example after a wrong answer, or none within two minutes.
        """
        return FrontendTurn(**self._ask("run", **asdict(workload)))


def rows(title: str, workload: FrontendWorkload, turns: dict[str, list[FrontendTurn]]) -> list[list[str]]:
    """A row per contender; the others are compared with the first."""
    ours = next(iter(turns.values()))
    return [_row(title, name, workload, ours, theirs) for name, theirs in turns.items()]


def _row(
    title: str, name: str, workload: FrontendWorkload, ours: list[FrontendTurn], theirs: list[FrontendTurn]
) -> list[str]:
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


def workloads(chosen: argparse.Namespace) -> dict[str, FrontendWorkload]:
    """The workloads by title."""
    common: dict[str, Any] = {"prompt_sentences": chosen.prompt_sentences, "window": chosen.window}
    at_once = {**common, "streaming": False, "answer_tokens": 16, "requests": chosen.requests}
    streamed = {**common, "streaming": True, "answer_tokens": chosen.stream_tokens, "requests": chosen.streams}
    return {
        f"{kind}{way}": FrontendWorkload(chat=kind == "chat", **fields)
        for way, fields in (("", at_once), (", streamed", streamed))
        for kind in ("chat", "completion")
    }


def _run(workload: FrontendWorkload, contender: FrontendProcess, _: int) -> FrontendTurn:
    return contender.run(workload)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=positive, default=5)
    parser.add_argument("--requests", type=positive, default=1000, help="requests per turn without streams")
    parser.add_argument("--streams", type=positive, default=64, help="streams per turn")
    parser.add_argument("--stream-tokens", type=positive, default=128, help="tokens per stream")
    parser.add_argument("--window", type=positive, default=32, help="outstanding requests")
    parser.add_argument(
        "--prompt-sentences", type=positive, default=6, help="sentences per prompt, of 16 tokens or 76 bytes"
    )
    add_peer_option(parser, PEERS)
    return parser.parse_args()


def main() -> None:
    """Measures each workload and prints the table; exit status 1 if a contender fails."""
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
                turns = run_in_turn(contenders, chosen.pairs, partial(_run, workload))
                table += rows(title, workload, {contender.name: theirs for contender, theirs in turns.items()})
            print_table(table)
            print(f"load of the machine at the end: {os.getloadavg()[0]:.1f} on {len(os.sched_getaffinity(0))} cores")
        except (ContenderError, OSError) as error:
            sys.exit(str(error))


if __name__ == "__main__":
    main()
