"""Time of a server from exec to its first answer: ours with its stages, and peers.

The model is SmolLM2-135M-Instruct from the cache folder (`make model`). In turn, every contender starts, answers a
request for one token, and ends. A first start of each is not measured: it loads the files into the page cache, and
fills our kernel cache. With --empty-kernel-cache ours starts without compiled kernels, as on a new node. README.md
describes how to install the peers and how to read the tables.

    python benchmarks/startup.py
    python benchmarks/startup.py --rounds 5 --peer llama-cpp=/path/to/bin/python --peer vllm=/path/to/bin/python
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from offline_throughput import write_checkpoint
from peers.command_line import add_peer_option, listed, positive, print_table
from peers.process import ContenderError
from peers.turns import ratio_cells, run_in_turn
from servers.forms import write_folder
from servers.server import Server, Start, llama_cpp, our_server, vllm_server
from servers.stages import STAGES, watch_stages

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
PEERS = ("llama-cpp", "vllm")
COLUMNS = ["server", "checkpoint", "first answer, s", "least, s", "ratio ours / it", "of the rounds", "versions"]


def cache_folder() -> Path:
    """The cache folder of `make model`."""
    usual = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatron-inference"
    return Path(os.environ.get("MEGATRON_CACHE_DIR") or usual)


def first_answer(threads: int, folder: Path, server: Server, round_number: int) -> float:
    """The seconds of one start.

    Raises:
        ContenderError: The server ended before it answered.
    """
    with _environment(server, folder) as prepared, Start(prepared, threads, folder / "log") as start:
        seconds = start.seconds_until(start.answers)
    print(f"round {round_number + 1}: {server.name} {seconds:.2f} s", flush=True)
    return seconds


def stages(threads: int, folder: Path, server: Server, rounds: int) -> list[list[str]]:
    """A table of our stages, from separate starts, because observing them takes some time itself."""
    found = []
    for _ in range(rounds + 1):
        with _environment(server, folder) as prepared, Start(prepared, threads, folder / "log") as start:
            found.append(watch_stages(start))
    rows = [
        [stage, f"{statistics.median(times):.2f}", f"{min(times):.2f}", meaning]
        for stage, meaning in STAGES.items()
        if (times := [each[stage] for each in found[1:]])
    ]
    return [["stage of ours", "median, s", "least, s", "meaning"], *rows]


@contextlib.contextmanager
def _environment(server: Server, folder: Path) -> Iterator[Server]:
    """The server, with an empty kernel cache if requested."""
    if "NUMBA_CACHE_DIR" not in server.environment:
        yield server
        return
    with tempfile.TemporaryDirectory(dir=folder) as empty:
        fresh = {**server.environment, "NUMBA_CACHE_DIR": empty}
        yield Server(server.name, server.python, server.command, server.checkpoint, server.packages, fresh)


def compare(
    pairs: Sequence[tuple[Server, Server | None]], chosen: argparse.Namespace, folder: Path, started: Server
) -> list[list[str]]:
    """Rows of the table: ours and, if given, the peer with the same checkpoint, in turn.

    Each first starts once without being measured, except ``started``, which already did.
    """
    rows = []
    for ours, peer in pairs:
        servers = [ours] if peer is None else [ours, peer]
        versions = {server: listed(server.versions()) for server in servers}
        run = partial(first_answer, chosen.threads, folder)
        for server in servers:
            if server is not started:
                run(server, -1)
        turns = run_in_turn(servers, chosen.rounds, run)
        for server, times in turns.items():
            ratios = [a / b for a, b in zip(turns[ours], times, strict=True) if server is not ours]
            least, median = f"{min(times):.2f}", f"{statistics.median(times):.2f}"
            name = server.checkpoint.suffix.removeprefix(".") or "safetensors"
            rows.append([server.name, name, median, least, *ratio_cells(ratios), versions[server]])
    return rows


def contenders(chosen: argparse.Namespace, folder: Path) -> list[tuple[Server, Server | None]]:
    """Ours with each peer: llama.cpp reads the GGUF file; vLLM, and ours beside it, the same weights as safetensors."""
    checkpoint = cache_folder() / "models" / FILE
    if chosen.model == "tiny":
        checkpoint = folder / "tiny"
        write_checkpoint(checkpoint, "tiny")
    environment = {"NUMBA_CACHE_DIR": ""} if chosen.empty_kernel_cache else {}
    ours, peers = our_server(checkpoint, environment), dict(chosen.peer or [])
    pairs: list[tuple[Server, Server | None]] = []
    if (python := peers.get("llama-cpp")) is not None:
        pairs.append((ours, Server("llama-cpp", python, llama_cpp, checkpoint, ("llama-cpp-python",))))
    if (python := peers.get("vllm")) is not None:
        whole = checkpoint
        if checkpoint.is_file():
            whole = folder / "safetensors"
            write_folder(checkpoint, whole)
        eager = {"enforce-eager": True}
        pairs.append((our_server(whole, environment), vllm_server(python, whole, {}, **eager)))
    return pairs or [(ours, None)]


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--threads", type=positive, default=len(os.sched_getaffinity(0)), help="of each contender")
    parser.add_argument("--model", choices=["smollm2", "tiny"], default="smollm2", help="tiny is for testing")
    parser.add_argument("--empty-kernel-cache", action="store_true", help="ours starts without compiled kernels")
    add_peer_option(parser, PEERS)
    return parser.parse_args()


def main() -> None:
    """Measures and prints both tables; exit status 1 if a contender fails."""
    chosen = parse()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        failures, rows = [], []
        pairs = contenders(chosen, folder)
        try:
            print_table(stages(chosen.threads, folder, pairs[0][0], chosen.rounds))
        except ContenderError as error:
            failures.append(str(error))
        for pair in pairs:
            try:
                rows += compare([pair], chosen, folder, pairs[0][0])
            except (ContenderError, OSError) as error:
                failures.append(str(error))
    if rows:
        print_table([COLUMNS, *rows])
    print(f"load of the machine at the end: {os.getloadavg()[0]:.1f} on {len(os.sched_getaffinity(0))} cores")
    for failure in failures:
        print(failure, file=sys.stderr)
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
