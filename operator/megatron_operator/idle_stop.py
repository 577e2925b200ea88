"""Scale to zero: when the pods of an idle model are stopped, and when they start again.

A pure function of the resource and the observed state, as the plan is. The status has the record of a stop, from
``STOP_DELAY`` before the first pod is deleted. A pod that ends aborts the requests of a suspended engine, so by then no
activator may send it one: an activator looks at the record at least every ``LOOK_INTERVAL`` seconds, and a request that
it sends before it sees the record resumes the engine, which ends the stop.

| record | engine | action | next record |
|---|---|---|---|
| none | suspended because it was idle, for less than ``stopAfter`` | none | none |
| none | the same, for ``stopAfter`` and ``LOOK_INTERVAL``, and no request within the latter | none | now |
| set, and no request since | suspended, or without a leader; for ``STOP_DELAY`` | pods are deleted | the same |
| set, and no request since | has requests, or another state: a request came first | pods run | none |
| set, and a request since | any | pods run | none |
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_operator.api.v1alpha1 import Lifecycle, MegatronInference, MegatronInferenceStatus
from megatron_operator.observed_state import EngineState, ObservedState
from megatron_operator.timestamps import seconds

STOP_DELAY = 15.0
"""Seconds from the record of a stop to the deletion of the pods."""
LOOK_INTERVAL = 5.0
"""Seconds for which an activator may rely on a status without a record. The rest of ``STOP_DELAY`` is for the write of
the record, and for the request to reach the engine."""


def is_idle(status: MegatronInferenceStatus) -> bool:
    """Whether the status has the record of a stop, and no request has come since."""
    stop, activation = status.idle_stop_time, status.activation_time
    return stop is not None and (activation is None or seconds(activation) < seconds(stop))


@dataclass(frozen=True)
class IdleStop:
    """The stop of an idle model. Without an activator nothing would start it again, so it is never stopped."""

    resource: MegatronInference
    observed: ObservedState
    has_activator: bool

    @property
    def is_stopped(self) -> bool:
        """Whether there should be no pods, because the model was idle and no request has come since."""
        at = self._stops_at
        return at is not None and at <= self.observed.now

    @property
    def due_at(self) -> float | None:
        """When time alone requires the next step of a stop, in seconds since the epoch; None while nothing is due."""
        if (at := self._stops_at) is not None:
            return at if at > self.observed.now else None
        status = self.resource.status
        if not self._is_enabled or not self._is_engine_idle:
            return None
        is_known = status.engine_state == EngineState.SUSPENDED and status.engine_state_time is not None
        since = seconds(status.engine_state_time) if is_known and status.engine_state_time else self.observed.now
        # Activators need the time to see that the model runs, and to send the requests that they hold for it.
        stop_after = max(self.resource.spec.auto_suspend.stop_after, LOOK_INTERVAL)
        activation = status.activation_time
        return max(since + stop_after, seconds(activation) + LOOK_INTERVAL if activation else 0.0)

    @property
    def next_record(self) -> float | None:
        """The time of the stop for the next status; None for a model that runs."""
        if self._stops_at is not None:
            return self._record
        due, activation = self.due_at, self.resource.status.activation_time
        if due is None or due > self.observed.now:
            return None
        # Later than an earlier request, even if the clock of the activator is ahead.
        return max(self.observed.now, seconds(activation) + 1 if activation else 0.0)

    @property
    def _stops_at(self) -> float | None:
        """When the pods are to be deleted; None without a record, or after a request."""
        record, engine = self._record, self.observed.engine
        if record is None or not is_idle(self.resource.status):
            return None
        has_answered = engine is not None and engine.state is not None
        return None if has_answered and not self._is_engine_idle else record + STOP_DELAY

    @property
    def _is_enabled(self) -> bool:
        spec = self.resource.spec
        wanted = spec.lifecycle is Lifecycle.RUNNING and spec.auto_suspend.stop_after > 0
        return wanted and self.has_activator and not self.resource.deleting

    @property
    def _record(self) -> float | None:
        record = self.resource.status.idle_stop_time
        return seconds(record) if record is not None and self._is_enabled else None

    @property
    def _is_engine_idle(self) -> bool:
        engine = self.observed.engine
        if engine is None or engine.state is not EngineState.SUSPENDED or not engine.auto_suspended:
            return False
        return engine.running_requests == engine.waiting_requests == 0
