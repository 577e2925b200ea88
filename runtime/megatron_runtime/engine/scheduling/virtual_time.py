"""Tags of sequences: when their bodies would be done if all bodies shared the engine equally."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from megatron_runtime.engine.scheduling.sequence import Sequence


@dataclass(slots=True)
class _Body:
    tag: float
    alive: int = 0


class VirtualTime:
    """The answers that each body would have had so far, if every body had as many as every other one.

    A body that arrives at time ``t`` with n answers would be done at ``t + n``, which is the tag of its sequences. To
    serve bodies in the order of their tags is the Fair Sojourn Protocol (Friedman and Henderson, "Fairness and
    efficiency in web server protocols", 2003): all are done about as early as with equal sharing, and mostly earlier.
    Bodies of equal size are served in the order of their arrival, a small one before a large one that arrived shortly
    before it, and a large one before all those that arrive after its tag.

    A sequence that ends advances the time by 1 / (number of bodies), so that the tags are a function of the arrivals
    and ends alone, and equal on all ranks.
    """

    def __init__(self) -> None:
        self._now = 0.0
        self._bodies: dict[Hashable, _Body] = {}

    def enter(self, sequence: Sequence) -> None:
        """Set the tag of a new sequence."""
        body = self._bodies.setdefault(_key(sequence), _Body(self._now + sequence.answers))
        body.alive += 1
        sequence.tag = body.tag

    def leave(self, sequence: Sequence) -> None:
        """A sequence has ended."""
        self._now += 1 / len(self._bodies)
        body = self._bodies[_key(sequence)]
        body.alive -= 1
        if not body.alive:
            del self._bodies[_key(sequence)]


def _key(sequence: Sequence) -> Hashable:
    return sequence.request_id if sequence.body is None else (sequence.tenant, sequence.body)
