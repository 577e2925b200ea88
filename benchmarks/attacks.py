"""What a client notices while others send requests that are made to be expensive.

megatron-serve runs with its default limits. A client asks for four tokens every 200 ms: first alone, then while four
connections send each of the requests in `attackers/requests.py` again and again. Exit status 1 if one of the client's
answers is wrong or missing, if a process of the server ended, or if a limit of slowness or memory is exceeded.

    python benchmarks/attacks.py
    python benchmarks/attacks.py --only "512 tools" --seconds 60
"""

from __future__ import annotations

import argparse
import collections
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from attackers.requests import Attack, attacks
from attackers.victim import MIB, Answers, Watch, ask_steadily, use_all_memory
from offline_throughput import write_checkpoint
from peers.command_line import positive, print_table
from servers.server import Start, our_server
from startup import FILE, cache_folder

SENDER = Path(__file__).parent / "attackers" / "sender.py"
SETTLE_SECONDS = 3.0
MOST_SECONDS = 90.0
"""After this time an attack without any response is not continued."""
KV_CACHE_MEMORY = {"smollm2": "256Mi", "tiny": "16Mi"}
"""Small, because it is filled before the measurement."""
COLUMNS = [
    "attack",
    "body, MiB",
    "statuses",
    "p50, s",
    "p99, s",
    "p99 / quiet",
    "step, s",
    "(p99 - step) / quiet",
    "wrong answers",
    "processes ended",
    "growth, MiB",
    "of",
    "growth / bodies",
    "remains, MiB",
]


@dataclass
class Trial:
    """One attack: what the client got, and what the server's processes did."""

    attack: Attack
    size: int
    statuses: dict[str, int]
    answers: Answers
    watch: Watch
    connections: int

    def slowdown(self, quiet: Answers) -> float:
        """The p99 without a step, as a multiple of that of the client alone."""
        return (self.answers.quantile(0.99) - self.answers.step) / quiet.quantile(0.99)

    def growth_of_bodies(self) -> float:
        """The largest growth of a process, as a multiple of the bodies of all connections."""
        return self.watch.growth() / (self.size * self.connections)

    def defects(self, quiet: Answers, right: str, *, max_slowdown: float, max_growth: float) -> list[str]:
        """Why the attack was not withstood; empty if it was. Growth counts for bodies of 1 MiB and more."""
        found = []
        if wrong := self.answers.wrong(right):
            found.append(f"{wrong} answers are wrong or missing")
        if ended := self.watch.ended():
            found.append(f"{ended} processes ended")
        if (slowdown := self.slowdown(quiet)) > max_slowdown:
            found.append(f"(p99 - step) / quiet is {slowdown:.1f}; the limit is {max_slowdown:g}")
        if self.size >= MIB and (growth := self.growth_of_bodies()) > max_growth:
            found.append(f"growth / bodies is {growth:.1f}; the limit is {max_growth:g}")
        return [f"{self.attack.name}: {defect}" for defect in found]

    def cells(self, quiet: Answers, right: str) -> list[str]:
        """The row of the table."""
        slowest, growth = self.answers.quantile(0.99), self.watch.growth()
        statuses = ", ".join(f"{number} x {status}" for status, number in sorted(self.statuses.items()))
        return [
            self.attack.name,
            f"{self.size / MIB:.2f}",
            statuses or "none",
            f"{self.answers.quantile(0.5):.3f}",
            f"{slowest:.3f}",
            f"{slowest / quiet.quantile(0.99):.1f}",
            f"{self.answers.step:.3f}",
            f"{self.slowdown(quiet):.1f}",
            str(self.answers.wrong(right)),
            str(self.watch.ended()),
            f"{growth / MIB:.0f}",
            self.watch.most_grown(),
            f"{self.growth_of_bodies():.1f}",
            f"{self.watch.remaining() / MIB:.0f}",
        ]


def try_attack(start: Start, attack: Attack, chosen: argparse.Namespace, folder: Path) -> Trial:
    """The client beside one attack, and shortly after it."""
    body, sent = attack.body(), folder / "statuses"
    file = folder / "body"
    file.write_bytes(body)
    port = start.control_port if attack.to_control else start.port
    command = [sys.executable, SENDER, str(port), attack.path, file, str(chosen.connections)]
    command += ["endless"] if attack.is_endless else []
    with Watch(start.pid) as watch:
        with sent.open("w") as out:
            sender = subprocess.Popen(command, stdout=out)
            try:
                answers = ask_during_attack(start.port, chosen.seconds, sent)
            finally:
                sender.kill()
                sender.wait()
        ask_steadily(start.port, chosen.rest)
    statuses = collections.Counter(sent.read_text().split())
    return Trial(attack, len(body), statuses, answers, watch, chosen.connections)


def ask_during_attack(port: int, seconds: float, statuses: Path) -> Answers:
    """Ask for ``seconds``, and again until a request of the attack had a response: the sender has the lowest priority,
    so on a busy machine it starts late. An attack that gets no response ends after MOST_SECONDS.
    """
    began = time.monotonic()
    answers = ask_steadily(port, seconds)
    while set(statuses.read_text().split()) <= {"0"} and time.monotonic() - began < MOST_SECONDS:
        answers.add(ask_steadily(port, seconds))
    return answers


def parse() -> argparse.Namespace:
    """The command line."""
    names = [attack.name for attack in attacks()]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0, help="length of each attack; default: 30")
    parser.add_argument("--rest", type=float, default=10.0, help="seconds after each attack; default: 10")
    parser.add_argument("--connections", type=positive, default=4, help="of the attacker; default: 4")
    parser.add_argument("--threads", type=positive, default=len(os.sched_getaffinity(0)), help="of the rank")
    parser.add_argument("--model", choices=["smollm2", "tiny"], default="smollm2", help="tiny is for testing")
    parser.add_argument("--max-slowdown", type=float, default=3.0, help="limit of (p99 - step) / quiet; default: 3")
    parser.add_argument(
        "--max-growth",
        type=float,
        default=4.0,
        help="limit of growth / bodies, for bodies of 1 MiB and more; default: 4",
    )
    parser.add_argument("--only", choices=names, action="append", metavar="NAME", help="repeatable; default: all")
    return parser.parse_args()


def main() -> int:
    """Prints the table; 1 if an attack was not withstood."""
    chosen = parse()
    chosen_attacks = [attack for attack in attacks() if not chosen.only or attack.name in chosen.only]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        checkpoint = cache_folder() / "models" / FILE
        if chosen.model == "tiny":
            checkpoint = folder / "tiny"
            write_checkpoint(checkpoint, "tiny")
        with Start(
            our_server(checkpoint, {}, **{"kv-cache-memory": KV_CACHE_MEMORY[chosen.model]}),
            chosen.threads,
            folder / "log",
        ) as start:
            start.seconds_until(start.answers)
            use_all_memory(start.port, start.pid)
            ask_steadily(start.port, SETTLE_SECONDS)
            quiet = ask_steadily(start.port, chosen.seconds)
            right = quiet.texts[0]
            if right is None:
                raise SystemExit("the server does not answer without an attack")
            print(f"quiet: p50 {quiet.quantile(0.5):.3f} s, p99 {quiet.quantile(0.99):.3f} s", flush=True)
            trials = []
            for attack in chosen_attacks:
                trials.append(try_attack(start, attack, chosen, folder))
                print(f"{attack.name}: p99 {trials[-1].answers.quantile(0.99):.3f} s", flush=True)
    print_table([COLUMNS, *(trial.cells(quiet, right) for trial in trials)])
    limits = {"max_slowdown": chosen.max_slowdown, "max_growth": chosen.max_growth}
    defects = [defect for trial in trials for defect in trial.defects(quiet, right, **limits)]
    print("\n".join(defects), file=sys.stderr)
    return int(bool(defects))


if __name__ == "__main__":
    sys.exit(main())
