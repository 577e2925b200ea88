"""A trial: a fault under load, the outcomes of the requests, and the health of the cluster meanwhile."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cluster_support.cluster import wait_until
from cluster_support.errors import NotReadyError
from cluster_support.processes import tail

from chaos.faults import Fault
from chaos.outcome import RequestOutcome, SeenError, read
from chaos.site import Site
from chaos.watch import Health, HealthWatch

FAULT_AFTER = 0.2
"""The fraction of the load's requests that have ended when the fault is injected."""
LONGEST_LOAD, LONGEST_RECOVERY = 300.0, 240.0
REST = 5.0
"""Seconds for which everything has to be healthy before the next fault."""

Answers = Mapping[int, str]


@dataclass(frozen=True)
class Trial:
    """``started`` is the time of the fault, as ``time.time``."""

    fault: Fault
    started: float
    outcomes: list[RequestOutcome]
    history: list[Health]

    def correct(self, answers: Answers) -> int:
        """Number of requests with a correct answer, including retries."""
        return sum(outcome.is_correct(answers) for outcome in self.outcomes)

    def wrong(self, answers: Answers) -> int:
        """Number of requests with a wrong answer."""
        return sum(outcome.text is not None and not outcome.is_correct(answers) for outcome in self.outcomes)

    @property
    def unanswered(self) -> int:
        """Number of requests that their programs gave up."""
        return sum(outcome.text is None for outcome in self.outcomes)

    @property
    def errors(self) -> list[SeenError]:
        """The errors that programs saw, except interrupted streams."""
        return [error for outcome in self.outcomes for error in outcome.errors if not error.interrupted]

    @property
    def interrupted(self) -> list[SeenError]:
        """Streams that were interrupted after they had begun."""
        return [error for outcome in self.outcomes for error in outcome.errors if error.interrupted]

    @property
    def retried(self) -> int:
        """Number of requests that a client retried by itself, without an error for its program."""
        return sum(outcome.retries > 0 for outcome in self.outcomes)

    @property
    def longest(self) -> float:
        """Seconds of the longest request."""
        return max(outcome.seconds for outcome in self.outcomes)

    @property
    def problems(self) -> list[str]:
        """The distinct problems after the fault, in order."""
        return list(dict.fromkeys(look.problems for look in self._after if look.problems))

    @property
    def seconds_unhealthy(self) -> float:
        """Seconds from the fault until everything stayed healthy; 0 if nothing was unhealthy."""
        amiss = [number for number, look in enumerate(self._after) if look.problems]
        return self._after[amiss[-1] + 1].at - self.started if amiss else 0.0

    @property
    def _after(self) -> list[Health]:
        return [look for look in self.history if look.at > self.started]


@dataclass(frozen=True)
class Load:
    """``requests`` requests, one every ``every`` seconds."""

    requests: int
    every: float


def try_fault(site: Site, fault: Fault, load: Load, out: Path) -> Trial:
    """Returns when the load has ended and everything is healthy; overwrites ``out``. Raises ClusterSupportError."""
    out.write_text("")
    fault.prepare(site)
    with HealthWatch(site) as watch, site.load(out, load.requests, load.every) as process:

        def have_ended(requests: float) -> bool:
            if process.exit_code() not in (None, 0):
                raise NotReadyError(f"the load ended early:\n{tail(process.log)}")
            return len(_outcomes(out)) >= requests

        wait_until(lambda: have_ended(load.requests * FAULT_AFTER), "the first answers", LONGEST_LOAD, every=0.05)
        fault.await_it(site)
        started = time.time()
        fault.inject(site)
        wait_until(lambda: have_ended(load.requests), "the last answers", LONGEST_LOAD, every=0.2)
        wait_until(
            lambda: watch.has_rested(REST),
            f"everything to be healthy after: {fault.words}",
            LONGEST_RECOVERY,
            every=0.2,
        )
    return Trial(fault, started, _outcomes(out), watch.history)


def ask_each(site: Site, questions: int, folder: Path) -> dict[int, str]:
    """The answers to all questions of the load, one request at a time."""
    out = folder / "answers.jsonl"
    with site.load(out, 2 * questions, 1.0) as process:
        process.wait(LONGEST_LOAD)
    return {outcome.question: outcome.text or "" for outcome in _outcomes(out)}


def _outcomes(out: Path) -> list[RequestOutcome]:
    with out.open() as lines:
        return read(lines)
