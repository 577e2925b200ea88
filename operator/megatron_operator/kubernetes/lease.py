"""One operator's view of the Lease. No clock, no network.

The rules are those of client-go's leader election: the holder renews the Lease, and the others may take it over when it
has not changed for its duration. Clocks of other machines are not trusted: durations count on the local clock, from the
time at which a change was observed. The holder stops acting well before others may take over.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Self

Spec = Mapping[str, Any]
RELEASED_FOR = 1
"""Duration of a Lease without a holder, in seconds; the API server requires at least one."""


@dataclass(frozen=True)
class LeaseName:
    """Namespace and name of the Lease."""

    namespace: str
    name: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse ``NAMESPACE/NAME``. Raises ValueError with value and fix."""
        namespace, _, name = text.partition("/")
        if not namespace or not name or "/" in name:
            raise ValueError(f"{text!r} is not a Lease; write NAMESPACE/NAME, like megatron-system/megatron-operator")
        return cls(namespace, name)

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True)
class LeaseTimings:
    """Timings of the leader election. ``seconds`` is the duration of the Lease, from which the others follow. Raises
    ValueError below 1."""

    seconds: int = 15

    def __post_init__(self) -> None:
        if self.seconds < 1:
            raise ValueError(f"the Lease duration is {self.seconds} s: set it to at least 1 s; 15 is usual")

    @property
    def deadline(self) -> float:
        """Seconds after a renewal at which the holder stops acting."""
        return self.seconds * 2 / 3

    @property
    def renew_interval(self) -> float:
        """Seconds between renewals."""
        return self.seconds / 3

    @property
    def retry_period(self) -> float:
        """Seconds between attempts while another operator holds the Lease, or the API server does not answer."""
        return min(2.0, self.seconds / 8)


class LeaseView:
    """The Lease as one operator sees it. All ``now`` are seconds on one monotonic clock."""

    def __init__(self, identity: str, timings: LeaseTimings) -> None:
        self.identity = identity
        self.timings = timings
        self._seen: Spec = {}
        self._seen_at = -math.inf
        self._held_until = -math.inf

    @property
    def holder(self) -> str:
        """The holder when it was last observed; empty without one."""
        return str(self._seen.get("holderIdentity") or "")

    def is_held(self, now: float) -> bool:
        """Whether this operator may act. False some time before another one may."""
        return now < self._held_until

    def seconds_left(self, now: float) -> float:
        """Seconds for which this operator may act without a renewal."""
        return max(0.0, self._held_until - now)

    def observe(self, spec: Spec, now: float) -> None:
        """Record the Lease as read. ``now`` must not be earlier than the answer."""
        if spec != self._seen:
            self._seen, self._seen_at = dict(spec), now
        if not self.owns(spec):
            self.forget()

    def seconds_until_free(self, now: float) -> float:
        """Seconds until the Lease expires for its holder; 0 when it may be acquired."""
        if not self.holder or self.owns(self._seen):
            return 0.0
        granted = self._seen.get("leaseDurationSeconds") or self.timings.seconds
        return max(0.0, self._seen_at + float(granted) - now)

    def desired_spec(self, wall: datetime) -> dict[str, Any]:
        """The spec that acquires or renews the Lease. ``wall`` is informational."""
        spec = {**self._seen, "holderIdentity": self.identity, "leaseDurationSeconds": self.timings.seconds}
        spec["renewTime"] = micro_time(wall)
        if not self.owns(self._seen):
            spec["acquireTime"] = spec["renewTime"]
            spec["leaseTransitions"] = int(self._seen.get("leaseTransitions") or 0) + bool(self._seen)
        return spec

    def release(self, spec: Spec, wall: datetime) -> dict[str, Any]:
        """The spec that releases the Lease, so that another operator may acquire it at once."""
        return {**spec, "holderIdentity": "", "leaseDurationSeconds": RELEASED_FOR, "renewTime": micro_time(wall)}

    def owns(self, spec: Spec) -> bool:
        """Whether the Lease names this operator, however old it is."""
        return spec.get("holderIdentity") == self.identity

    def record_written(self, spec: Spec, began: float) -> None:
        """Record that ``spec`` was written; ``began`` is when the request was sent."""
        self._seen, self._seen_at = dict(spec), began
        self._held_until = began + self.timings.deadline

    def forget(self) -> None:
        """This operator no longer holds the Lease."""
        self._held_until = -math.inf


def micro_time(moment: datetime) -> str:
    """A time in the format of Kubernetes' MicroTime."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
