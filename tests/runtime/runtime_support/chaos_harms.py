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
from typing import Any

from runtime_support.reused_identities import reuse_identities

LAUNCHER = "launcher"
IDENTITIES = "identities"


@dataclass(frozen=True)
class Harm:
    """``victim`` is a word of the command line of a pod's process, LAUNCHER, or IDENTITIES.

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


class Reaper:
    """Does harm to a pod, one after the other. Stalls of several processes may overlap.

    Attributes:
        done: The harms, and their number.
    """

    def __init__(self, pod: Any, rng: random.Random) -> None:
        self._pod = pod
        self._rng = rng
        self._stopped: set[int] = set()
        self.done: Counter[Harm] = Counter()

    async def run(self, harms: Sequence[Harm], pace: Callable[[int], Awaitable[object]]) -> None:
        """Returns after the last one, when all stopped processes continue; ``pace`` is awaited before each."""
        async with asyncio.TaskGroup() as group:
            for number, harm in enumerate(harms):
                await pace(number)
                if harm.victim == IDENTITIES:
                    address = f"tcp://{self._pod.host}:5557"
                    group.create_task(asyncio.to_thread(reuse_identities, address, self._pod.key))
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
            if word == LAUNCHER:
                found = [self._pod.process.pid]
            else:
                found = [pid for pid, command in self._pod.children().items() if word in command]
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
