"""Speed of an OpenAI server: ours beside vLLM's, saturated and at a fixed rate of requests.

Clients read streams of `/v1/completions` and measure tokens per second, the time to the first token and the time per
further token. In turn, every contender starts, serves both loads, and ends. README.md describes how to install vLLM and
how to read the table.

    python benchmarks/serving.py --peer vllm=/path/to/bin/python
    python benchmarks/serving.py --peer vllm=/path/to/bin/python --dtype float32 --load 0.8 --pairs 3
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from offline_throughput import MODELS, write_checkpoint
from peers.command_line import add_peer_option, listed, positive, print_table
from peers.process import ContenderError
from peers.turns import quantile, ratio_cells, run_in_turn
from servers.forms import write_folder
from servers.load import LoadTimes, Work, arrive, saturate
from servers.server import Server, Start, our_server, vllm_server
from startup import FILE, cache_folder

PEERS = ("vllm", "ours")
COLUMNS = ["load", "measure", "ours", "peer", "ratio ours / it", "of the pairs"]
TOKEN_IDS = {"smollm2": range(1000, 49_000), "tiny": range(3, MODELS["tiny"]["vocab_size"])}
"""Ordinary tokens of the models."""


MEASURES: dict[str, Callable[[LoadTimes], float]] = {
    "tokens/s": lambda times: times.speed,
    "first token, median, ms": lambda times: 1000 * quantile(times.first, 0.5),
    "first token, p99, ms": lambda times: 1000 * quantile(times.first, 0.99),
    "further token, median, ms": lambda times: 1000 * quantile(times.further, 0.5),
    "further token, p99, ms": lambda times: 1000 * quantile(times.further, 0.99),
}


@dataclass(frozen=True)
class Turn:
    """The loads of one start of a server; ``steady`` is the one at a fixed rate."""

    saturated: LoadTimes
    steady: LoadTimes


@dataclass(frozen=True)
class Loads:
    """What a server serves in each turn."""

    work: Work
    window: int
    steady_requests: int
    threads: int
    folder: Path

    def first_speed(self, server: Server) -> float:
        """Tokens per second of a saturated server in a start of its own, which leaves compiled code in its caches."""
        with self._started(server) as start:
            return self._saturate(start, -1).speed

    def turn(self, rate: float, server: Server, number: int) -> Turn:
        """Both loads, one after the other."""
        with self._started(server) as start:
            saturated = self._saturate(start, 2 * number)
            work = replace(self.work, requests=self.steady_requests)
            steady = _served(server, partial(arrive, start.port, work, rate, 2 * number + 1))
        first = f"first token {1000 * quantile(steady.first, 0.5):.0f} ms"
        print(f"pair {number + 1}: {server.name} {saturated.speed:.0f} tokens/s, {first}", flush=True)
        return Turn(saturated, steady)

    def _started(self, server: Server) -> Start:
        return Start(server, self.threads, self.folder / "log")

    def _saturate(self, start: Start, seed: int) -> LoadTimes:
        start.seconds_until(start.answers)
        return _served(start.server, partial(saturate, start.port, self.work, self.window, seed))


def _served(server: Server, load: Callable[[], LoadTimes]) -> LoadTimes:
    try:
        return load()
    except (OSError, ValueError) as error:
        raise ContenderError(f"{server.name}: {error}") from error


def compare(ours: Server, peer: Server, chosen: argparse.Namespace, loads: Loads) -> list[list[str]]:
    """The table's rows."""
    for server in (ours, peer):
        print(f"{server.name}: {listed(server.versions())}", flush=True)
    speeds = [loads.first_speed(server) for server in (ours, peer)]
    rate = chosen.rate or chosen.load * min(speeds) / loads.work.new_tokens
    print(f"first start: {speeds[0]:.0f} and {speeds[1]:.0f} tokens/s", flush=True)
    turns = run_in_turn([ours, peer], chosen.pairs, partial(loads.turn, rate))
    saturated, steady = f"{loads.window} streams at once", f"{rate:.3g} requests/s"
    return [
        *rows(saturated, *([turn.saturated for turn in turns[server]] for server in (ours, peer))),
        *rows(steady, *([turn.steady for turn in turns[server]] for server in (ours, peer))),
    ]


def rows(title: str, ours: list[LoadTimes], theirs: list[LoadTimes]) -> list[list[str]]:
    """A row for each measure of a load."""
    found = []
    for name, measure in MEASURES.items():
        pairs = [(measure(one), measure(other)) for one, other in zip(ours, theirs, strict=True)]
        medians = [f"{statistics.median(values):.4g}" for values in zip(*pairs, strict=True)]
        found.append([title, name, *medians, *ratio_cells([one / other for one, other in pairs])])
    return found


def contenders(chosen: argparse.Namespace, folder: Path) -> tuple[Server, Server]:
    """Ours and the peer, with the same checkpoint in safetensors."""
    checkpoint = folder / "checkpoint"
    if chosen.model == "tiny":
        write_checkpoint(checkpoint, "tiny")
    else:
        write_folder(cache_folder() / "models" / FILE, checkpoint)
    ours = our_server(checkpoint, {}, dtype=chosen.dtype)
    (name, python), *_ = chosen.peer or [("ours", sys.executable)]
    if name == "ours":
        return ours, our_server(checkpoint, {}, dtype=chosen.dtype)
    cores = sorted(os.sched_getaffinity(0))[: chosen.threads]
    settings = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores))}
    options = {"dtype": chosen.dtype} | ({"enforce-eager": True} if chosen.eager_peer else {})
    return ours, vllm_server(python, checkpoint, settings, **options)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=positive, default=5)
    parser.add_argument("--window", type=positive, default=32, help="streams of the saturated server; default: 32")
    parser.add_argument("--requests", type=positive, default=96, help="to the saturated server; default: 96")
    parser.add_argument("--steady-requests", type=positive, default=64, help="at the fixed rate; default: 64")
    parser.add_argument(
        "--load", type=float, default=0.5, help="fixed rate as a share of what the slower one serves; default: 0.5"
    )
    parser.add_argument("--rate", type=float, help="fixed rate in requests per second, instead of --load")
    parser.add_argument("--prompt-tokens", type=positive, default=128)
    parser.add_argument("--new-tokens", type=positive, default=128)
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="bfloat16")
    parser.add_argument("--threads", type=positive, default=len(os.sched_getaffinity(0)), help="of each contender")
    parser.add_argument("--model", choices=TOKEN_IDS, default="smollm2", help="tiny is for testing")
    parser.add_argument("--eager-peer", action="store_true", help="vLLM with --enforce-eager")
    add_peer_option(parser, PEERS)
    return parser.parse_args()


def main() -> None:
    """Measures and prints the table; exit status 1 if a contender fails."""
    chosen = parse()
    work = Work(chosen.requests, chosen.prompt_tokens, chosen.new_tokens, TOKEN_IDS[chosen.model])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        loads = Loads(work, chosen.window, chosen.steady_requests, chosen.threads, folder)
        try:
            print_table([COLUMNS, *compare(*contenders(chosen, folder), chosen, loads)])
        except (ContenderError, OSError) as error:
            sys.exit(str(error))
    print(f"load of the machine at the end: {os.getloadavg()[0]:.1f} on {len(os.sched_getaffinity(0))} cores")


if __name__ == "__main__":
    main()
