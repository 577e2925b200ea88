"""One fault under the load: what it was, what became of the requests, and how things looked meanwhile."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cluster_support.cluster import wait_until
from cluster_support.errors import NotReadyError
from cluster_support.processes import tail

from chaos.faults import Fault
from chaos.outcome import Outcome, SeenError, read
from chaos.site import Site
from chaos.watch import Look, Watch

STRUCK_AFTER = 0.2
"""Of the load's requests, which have ended by then."""
LONGEST_LOAD, LONGEST_RECOVERY = 300.0, 240.0
REST = 5.0
"""Seconds for which all has to be well before the next fault."""

Answers = Mapping[int, str]


@dataclass(frozen=True)
class Trial:
    """``struck`` is when the fault came, as ``time.time`` tells it."""

    fault: Fault
    struck: float
    outcomes: list[Outcome]
    looks: list[Look]

    def right(self, answers: Answers) -> int:
        """Requests that were answered, and rightly, asking again included."""
        return sum(outcome.is_right(answers) for outcome in self.outcomes)

    def wrong(self, answers: Answers) -> int:
        """Requests that were answered otherwise."""
        return sum(outcome.text is not None and not outcome.is_right(answers) for outcome in self.outcomes)

    @property
    def unanswered(self) -> int:
        """Requests that their programs gave up."""
        return sum(outcome.text is None for outcome in self.outcomes)

    @property
    def errors(self) -> list[SeenError]:
        """All that programs saw but streams that broke off."""
        return [error for outcome in self.outcomes for error in outcome.errors if not error.broken]

    @property
    def broken(self) -> list[SeenError]:
        """Streams that broke off after they had begun."""
        return [error for outcome in self.outcomes for error in outcome.errors if error.broken]

    @property
    def retried(self) -> int:
        """Requests that a client sent again by itself, of which its program saw nothing."""
        return sum(outcome.retries > 0 for outcome in self.outcomes)

    @property
    def longest(self) -> float:
        """Seconds to the answer of the request that took longest."""
        return max(outcome.seconds for outcome in self.outcomes)

    @property
    def lacking(self) -> list[str]:
        """What was amiss after the fault, each once, in order."""
        return list(dict.fromkeys(look.lacking for look in self._after if look.lacking))

    @property
    def seconds_amiss(self) -> float:
        """From the fault until all was well for good; 0 when nothing was ever amiss."""
        amiss = [number for number, look in enumerate(self._after) if look.lacking]
        return self._after[amiss[-1] + 1].at - self.struck if amiss else 0.0

    @property
    def _after(self) -> list[Look]:
        return [look for look in self.looks if look.at > self.struck]


@dataclass(frozen=True)
class Load:
    """So many requests, one every so many seconds."""

    requests: int
    every: float


def try_fault(site: Site, fault: Fault, load: Load, out: Path) -> Trial:
    """Returns when the load is over and all is well again; ``out`` is written anew. Raises ClusterSupportError."""
    out.write_text("")
    fault.prepare(site)
    with Watch(site) as watch, site.load(out, load.requests, load.every) as process:

        def have_ended(requests: float) -> bool:
            if process.exit_code() not in (None, 0):
                raise NotReadyError(f"the load ended early:\n{tail(process.log)}")
            return len(_outcomes(out)) >= requests

        wait_until(lambda: have_ended(load.requests * STRUCK_AFTER), "the first answers", LONGEST_LOAD, every=0.05)
        fault.await_it(site)
        struck = time.time()
        fault.strike(site)
        wait_until(lambda: have_ended(load.requests), "the last answers", LONGEST_LOAD, every=0.2)
        wait_until(lambda: watch.has_rested(REST), f"all to be well after: {fault.words}", LONGEST_RECOVERY, every=0.2)
    return Trial(fault, struck, _outcomes(out), watch.looks)


def ask_each(site: Site, questions: int, folder: Path) -> dict[int, str]:
    """The answers to all questions of the load, each asked alone."""
    out = folder / "answers.jsonl"
    with site.load(out, 2 * questions, 1.0) as process:
        process.wait(LONGEST_LOAD)
    return {outcome.question: outcome.text or "" for outcome in _outcomes(out)}


def _outcomes(out: Path) -> list[Outcome]:
    with out.open() as lines:
        return read(lines)
