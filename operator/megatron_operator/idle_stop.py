"""Scale to zero: when the pods of an idle model are stopped, and when they start again.

A pure function of the resource and the observed state, as the plan is. The status has the record of a stop. It is
written before the first pod is deleted, so that an operator that restarts meanwhile continues the stop:

| record | engine | action | next record |
|---|---|---|---|
| none | suspended because it was idle, for less than ``stopAfter`` | none | none |
| none | the same, for ``stopAfter`` | none | now |
| set, and no request since | suspended, or without a leader | pods are deleted | the same |
| set, and no request since | running: a request came first | pods run | none |
| set, and a request since | any | pods run | none |
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_operator.api.v1alpha1 import Lifecycle, MegatronInference
from megatron_operator.observed_state import EngineState, ObservedState
from megatron_operator.timestamps import seconds


@dataclass(frozen=True)
class IdleStop:
    """The stop of an idle model. Without an activator nothing would start it again, so it is never stopped."""

    resource: MegatronInference
    observed: ObservedState
    has_activator: bool

    @property
    def is_stopped(self) -> bool:
        """Whether there should be no pods, because the model was idle and no request has come since."""
        record = self._record
        return record is not None and not self._has_request_since(record) and not self._is_engine_running

    @property
    def due_at(self) -> float | None:
        """When the model is to be stopped, in seconds since the epoch; None while its engine is not idle."""
        engine, status = self.observed.engine, self.resource.status
        if not self._is_enabled or self.is_stopped or engine is None or not engine.auto_suspended:
            return None
        if engine.state is not EngineState.SUSPENDED:
            return None
        is_known = status.engine_state == EngineState.SUSPENDED and status.engine_state_time is not None
        since = seconds(status.engine_state_time) if is_known and status.engine_state_time else self.observed.now
        return since + self.resource.spec.auto_suspend.stop_after

    @property
    def next_record(self) -> float | None:
        """The time of the stop for the next status; None for a model that runs."""
        if self.is_stopped:
            return self._record
        due, activation = self.due_at, self.resource.status.activation_time
        if due is None or due > self.observed.now:
            return None
        # Later than an earlier request, even if the clock of the activator is ahead.
        return max(self.observed.now, seconds(activation) + 1 if activation else 0.0)

    @property
    def _is_enabled(self) -> bool:
        spec = self.resource.spec
        wanted = spec.lifecycle is Lifecycle.RUNNING and spec.auto_suspend.stop_after > 0
        return wanted and self.has_activator and not self.resource.deleting

    @property
    def _record(self) -> float | None:
        record = self.resource.status.idle_stop_time
        return seconds(record) if record is not None and self._is_enabled else None

    def _has_request_since(self, record: float) -> bool:
        activation = self.resource.status.activation_time
        return activation is not None and seconds(activation) >= record

    @property
    def _is_engine_running(self) -> bool:
        engine = self.observed.engine
        return engine is not None and engine.state is not None and not engine.auto_suspended
