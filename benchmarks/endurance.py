"""What clients of a service see while the processes of its pods are killed and stopped at random, without a cluster.

`megatron-operator local` runs the pods as processes. The requests, the harms and the checks are those of the hour of
chaos in `make test-long`: bursts of 100 requests keep the service at 30 % of the load that it can serve, over HTTP and
through the client of the library, streamed or not, with bodies of up to 1 MB and prefixes in common. Some clients
disconnect and send the request again with the same Idempotency-Key. Meanwhile ranks, coordinators, frontends and
launchers are killed, or stopped for 1 to 60 s, and connections to the coordinator reuse the identity of another one.
Exit status 1 if a request is lost, or answered twice or wrong, or if the 99th percentile of the waiting time exceeds a
limit.

    python benchmarks/endurance.py
    python benchmarks/endurance.py --layout tensor --harms 334 --seconds 1200
"""

from __future__ import annotations

import argparse
import asyncio
import random
import secrets
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from peers.command_line import positive, print_table

ROOT = Path(__file__).parent.parent
# The support modules of the tests provide the pod, the requests and the harms.
sys.path += [str(ROOT / "tests" / "runtime"), str(ROOT / "tests")]

from runtime_support.chaos_harms import Harm  # noqa: E402
from runtime_support.chaos_trial import LAYOUTS, LOAD, Trial, random_harms  # noqa: E402
from suite_support.service_trial import harm_service  # noqa: E402

COLUMNS = ["replica groups", "requests", "kills", "stalls", "reconnections", "p50, s", "p99, s", "longest, s", "errors"]


@dataclass
class Outcome:
    """One trial: what clients got, and the harms of the pod."""

    layout: str
    trial: Trial
    requests: int
    harms: Sequence[Harm]

    def defects(self, max_wait: float) -> list[str]:
        """Why the trial failed; empty if it did not."""
        found = self.trial.defects(self.requests, self.harms)
        if (slowest := self.trial.crowd.wait(0.99)) > max_wait:
            found.append(f"p99 is {slowest:.1f} s; the limit is {max_wait:g}")
        return [f"{self.layout}: {defect}" for defect in found]

    def cells(self) -> list[str]:
        """The row of the table. Each error was followed by a retry."""
        crowd = self.trial.crowd
        kinds = Counter(harm.kind for harm in self.harms)
        return [
            self.layout,
            str(self.requests),
            *(str(kinds[kind]) for kind in ("kill", "stall", "reconnections")),
            *(f"{crowd.wait(share):.1f}" for share in (0.5, 0.99, 1)),
            ", ".join(f"{count} x {error}" for error, count in sorted(crowd.errors.items())) or "0",
        ]


async def try_layout(layout: str, chosen: argparse.Namespace, folder: Path) -> Outcome:
    """A service with these replica groups, under load and harms."""
    rng = random.Random(chosen.seed)
    harms = random_harms(rng, chosen.harms)
    trial, requests = await harm_service(folder, layout, rng, chosen.jobs, harms, chosen.seconds, chosen.load)
    return Outcome(layout, trial, requests, harms)


def main() -> int:
    """Prints the table; 1 if a trial failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", choices=LAYOUTS, action="append", help="repeatable; default: all")
    parser.add_argument("--jobs", type=positive, default=150, help="different requests; default: 150")
    parser.add_argument("--harms", type=positive, default=100, help="for each layout; default: 100")
    parser.add_argument("--seconds", type=float, default=360.0, help="length of each trial; default: 360")
    parser.add_argument("--load", type=float, default=LOAD, help="share of what it serves without harm; default: 0.3")
    parser.add_argument("--max-wait", type=float, default=20.0, help="limit of the p99 in seconds; default: 20")
    parser.add_argument("--seed", type=int, default=secrets.randbits(32), help="of requests and harms; default: random")
    chosen = parser.parse_args()
    print(f"--seed {chosen.seed}", flush=True)
    outcomes = []
    for layout in chosen.layout or LAYOUTS:
        with tempfile.TemporaryDirectory() as name:
            outcomes.append(asyncio.run(try_layout(layout, chosen, Path(name))))
    print_table([COLUMNS, *(outcome.cells() for outcome in outcomes)])
    defects = [defect for outcome in outcomes for defect in outcome.defects(chosen.max_wait)]
    print("\n".join(defects), file=sys.stderr)
    return int(bool(defects))


if __name__ == "__main__":
    sys.exit(main())
