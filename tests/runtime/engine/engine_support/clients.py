"""Clients that add bodies to a scheduler."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from engine_support.prefixes import sequence_of

from megatron_runtime.engine.scheduling.scheduler import Scheduler
from megatron_runtime.engine.scheduling.sequence import Sequence


class Client:
    """Adds bodies to a scheduler; as one of several, it has numbers of its own."""

    def __init__(self, scheduler: Scheduler, ids: Iterator[int], tenant: str = "") -> None:
        self._scheduler = scheduler
        self._ids = ids
        self._tenant = tenant

    def send(self, answers: int, *, prompt: int = 5, length: int = 60, priority: int = 0) -> list[Sequence]:
        first = next(self._ids)
        numbers = [first, *itertools.islice(self._ids, answers - 1)]
        sequences = [sequence_of(number, [first] * prompt, length) for number in numbers]
        for each in sequences:
            each.tenant, each.body, each.answers, each.priority = self._tenant, str(first), answers, priority
            self._scheduler.add(each)
        return sequences


def client_of(scheduler: Scheduler, tenant: str = "") -> Client:
    return Client(scheduler, itertools.count(1_000_000 if tenant else 0), tenant)
