"""Kills and stalls of the processes of a pod, and connections that reuse an identity."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from runtime_support.reused_identities import reuse_identities

LAUNCHER = "launcher"
IDENTITIES = "identities"


@dataclass(frozen=True)
class Harm:
    """``victim`` is a word of the command line of a process, LAUNCHER, or IDENTITIES.

    The victim is killed, or stopped for ``stall`` seconds.
    """

    victim: str
    stall: float | None = None

    @property
    def kind(self) -> str:
        """``reconnections``, ``kill`` or ``stall``."""
        if self.victim == IDENTITIES:
            return "reconnections"
        return "kill" if self.stall is None else "stall"


class Harmed(Protocol):
    """A pod, or a service of several pods."""

    @property
    def url(self) -> str:
        """Base URL of the OpenAI endpoint."""

    @property
    def coordinator(self) -> str:
        """Address of the coordinator."""

    @property
    def key(self) -> str:
        """The key of the coordinator."""

    def processes(self, word: str) -> list[int]:
        """Running processes whose command line has ``word``."""

    def launchers(self) -> list[int]:
        """The launchers that run."""

    def words(self) -> str:
        """The end of the log."""


class Reaper:
    """Does one harm after the other. Stalls of several processes may overlap.

    Attributes:
        done: The harms, and their number.
    """

    def __init__(self, harmed: Harmed, rng: random.Random) -> None:
        self._harmed = harmed
        self._rng = rng
        self._stopped: set[int] = set()
        self.done: Counter[Harm] = Counter()

    async def run(self, harms: Sequence[Harm], pace: Callable[[int], Awaitable[object]]) -> None:
        """Returns after the last one, when all stopped processes continue; ``pace`` is awaited before each."""
        async with asyncio.TaskGroup() as group:
            for number, harm in enumerate(harms):
                await pace(number)
                if harm.victim == IDENTITIES:
                    where = self._harmed.coordinator, self._harmed.key
                    group.create_task(asyncio.to_thread(reuse_identities, *where))
                else:
                    victim = await self._process(harm.victim)
                    os.kill(victim, signal.SIGKILL if harm.stall is None else signal.SIGSTOP)
                    if harm.stall is not None:
                        self._stopped.add(victim)
                        group.create_task(self._let_continue(victim, harm.stall))
                self.done[harm] += 1

    async def _process(self, word: str) -> int:
        """A running process of this kind; waits for one that is being restarted."""
        while True:
            found = self._harmed.launchers() if word == LAUNCHER else self._harmed.processes(word)
            if found := sorted(set(found) - self._stopped):
                return self._rng.choice(found)
            await asyncio.sleep(0.02)

    async def _let_continue(self, pid: int, seconds: float) -> None:
        try:
            await asyncio.sleep(seconds)
        finally:
            self._stopped.discard(pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
