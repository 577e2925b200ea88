"""What one of several operators knows of their Lease, and what follows from it. No clock, no network.

The rules are those of client-go's leader election: who holds the Lease works and renews it; the others take it over
once it has not changed for as long as it was granted. Clocks of other machines are not believed: seconds are counted on
our own clock, from when a change was seen here. A holder stops well before the others may think that it is gone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Self

Spec = Mapping[str, Any]
RELEASED_FOR = 1
"""Seconds that a Lease without a holder is granted for; the API server wants at least one."""


@dataclass(frozen=True)
class LeaseName:
    """Where the Lease is."""

    namespace: str
    name: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads ``NAMESPACE/NAME``. Raises ValueError with value and mend."""
        namespace, _, name = text.partition("/")
        if not namespace or not name or "/" in name:
            raise ValueError(f"{text!r} names no Lease; write NAMESPACE/NAME, like megatron-system/megatron-operator")
        return cls(namespace, name)

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True)
class LeaseTimings:
    """``seconds``: what a Lease is granted for. The other times follow from it. Raises ValueError below 1."""

    seconds: int = 15

    def __post_init__(self) -> None:
        if self.seconds < 1:
            raise ValueError(f"a Lease of {self.seconds} s: grant it for at least 1 s; 15 are usual")

    @property
    def deadline(self) -> float:
        """Seconds after a renewal when its holder stops to act."""
        return self.seconds * 2 / 3

    @property
    def renew_interval(self) -> float:
        """Seconds from one renewal to the next."""
        return self.seconds / 3

    @property
    def retry_period(self) -> float:
        """Seconds from one attempt to the next while another holds the Lease, or the API server does not answer."""
        return min(2.0, self.seconds / 8)


class LeaseView:
    """One operator's view. All ``now`` are seconds on one monotonic clock."""

    def __init__(self, identity: str, timings: LeaseTimings) -> None:
        self.identity = identity
        self.timings = timings
        self._seen: Spec = {}
        self._seen_at = -math.inf
        self._held_until = -math.inf

    @property
    def holder(self) -> str:
        """Who held it when it was last seen; empty: nobody."""
        return str(self._seen.get("holderIdentity") or "")

    def is_held(self, now: float) -> bool:
        """Whether we may act. False some time before anybody else may."""
        return now < self._held_until

    def seconds_left(self, now: float) -> float:
        """How long we may go on without a renewal."""
        return max(0.0, self._held_until - now)

    def observe(self, spec: Spec, now: float) -> None:
        """The Lease was read. ``now`` must not be earlier than the answer."""
        if spec != self._seen:
            self._seen, self._seen_at = dict(spec), now
        if not self.owns(spec):
            self.forget()

    def seconds_until_free(self, now: float) -> float:
        """How long the Lease, as it was last seen, is another's; 0: it may be taken."""
        if not self.holder or self.owns(self._seen):
            return 0.0
        granted = self._seen.get("leaseDurationSeconds") or self.timings.seconds
        return max(0.0, self._seen_at + float(granted) - now)

    def desired_spec(self, wall: datetime) -> dict[str, Any]:
        """What to write, to take the Lease or to keep it. ``wall`` is for readers alone."""
        spec = {**self._seen, "holderIdentity": self.identity, "leaseDurationSeconds": self.timings.seconds}
        spec["renewTime"] = micro_time(wall)
        if not self.owns(self._seen):
            spec["acquireTime"] = spec["renewTime"]
            spec["leaseTransitions"] = int(self._seen.get("leaseTransitions") or 0) + bool(self._seen)
        return spec

    def release(self, spec: Spec, wall: datetime) -> dict[str, Any]:
        """What to write instead of ``spec`` to let go of it: whoever sees that may take it at once."""
        return {**spec, "holderIdentity": "", "leaseDurationSeconds": RELEASED_FOR, "renewTime": micro_time(wall)}

    def owns(self, spec: Spec) -> bool:
        """Whether the Lease names us, however old that may be."""
        return spec.get("holderIdentity") == self.identity

    def record_written(self, spec: Spec, began: float) -> None:
        """``spec``, our wish, is what the Lease says; ``began`` is when we set out to write it."""
        self._seen, self._seen_at = dict(spec), began
        self._held_until = began + self.timings.deadline

    def forget(self) -> None:
        """From now on we do not hold it, whatever the Lease says."""
        self._held_until = -math.inf


def micro_time(moment: datetime) -> str:
    """As Kubernetes' MicroTime is written."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
