"""An engine without a model: each token is a function of the prompt, the seed and the position."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_runtime.engine.step_result import EngineStats, PartialOutput
from megatron_runtime.errors import CheckpointError
from megatron_runtime.inference_request import DynamicInferenceRequest, DynamicInferenceRequestRecord, Status
from megatron_runtime.sampling_params import SamplingParams
from megatron_runtime.wire.items import AdapterEntry


def expected_tokens(prompt: str | list[int], params: SamplingParams) -> list[int]:
    """The answer without failures."""
    start = sum(prompt.encode() if isinstance(prompt, str) else prompt) + (params.seed or 0)
    return [(start * 31 + position * 7919) % 50_000 for position in range(params.num_tokens_to_generate or 0)]


@dataclass
class _Running:
    wanted: list[int]
    """The whole answer."""
    params: SamplingParams
    made: list[int]
    emitted: int
    record: DynamicInferenceRequestRecord


@dataclass
class FakeEngine:
    """Makes one token per running request and step.

    Attributes:
        step_seconds: How long a step takes.
        fail_at_step: The step that raises.
        steps: Steps done.
        weights: Those that it was given, in order.
        refuses: The path of weights or of an adapter that it can't load.
        own: Names and paths of the adapters that it was started with.
        adapters: Those that the coordinator has assigned.
        epochs: Generation epochs that were set.
        staleness: Weight updates that were counted.
        prefix_resets: How often the cached prefixes were dropped.
        profiles: Starts and stops of the profiler.
        ledger: The uid of each finished request.
        added: Requests added, in order, with the number of tokens made elsewhere.
    """

    step_seconds: float = 0.0
    fail_at_step: int | None = None
    steps: int = 0
    is_suspended: bool = False
    failed_with: Exception | None = None
    added: list[int] = field(default_factory=list)
    weights: list[Any] = field(default_factory=list)
    weight_version: int = 0
    refuses: str | None = None
    epochs: list[int] = field(default_factory=list)
    staleness: int = 0
    prefix_resets: int = 0
    profiles: list[str] = field(default_factory=list)
    ledger: list[str | None] = field(default_factory=list)
    own: list[tuple[str, str]] = field(default_factory=list)
    adapters: list[AdapterEntry] = field(default_factory=list)
    _running: dict[int, _Running] = field(default_factory=dict)
    _finished: list[DynamicInferenceRequestRecord] = field(default_factory=list)
    _partials: dict[int, PartialOutput] = field(default_factory=dict)

    def add_request(
        self, request_id: int, prompt: Any, sampling_params: SamplingParams | None, *, generated: Sequence[int] = ()
    ) -> None:
        params = sampling_params or SamplingParams()
        self.added.append(len(generated))
        record = DynamicInferenceRequestRecord.from_request(
            DynamicInferenceRequest(request_id=request_id, sampling_params=params)
        )
        wanted = expected_tokens(prompt, params)
        self._running[request_id] = _Running(wanted, params, list(generated), len(generated), record)
        if params.num_tokens_to_generate is None:
            self._end(request_id, "error")

    def abort_request(self, request_id: int) -> bool:
        if request_id not in self._running:
            return False
        self._end(request_id, "abort")
        return True

    def fail_all_requests(self, error: Exception) -> None:
        self.failed_with = error
        for request_id in list(self._running):
            self._end(request_id, "error")

    def has_unfinished_requests(self) -> bool:
        return bool(self._running or self._finished or self._partials)

    def step_modern(self) -> dict[str, Any]:
        assert not self.is_suspended
        if self.step_seconds:
            time.sleep(self.step_seconds)
        self.steps += 1
        if self.steps == self.fail_at_step:
            raise ArithmeticError("the fake engine broke")
        for request_id, running in list(self._running.items()):
            if len(running.made) < len(running.wanted):
                running.made.append(running.wanted[len(running.made)])
            done = len(running.made) >= len(running.wanted)
            if done or len(running.made) - running.emitted >= running.params.streaming_interval:
                self._partials[request_id] = PartialOutput(request_id, running.made[running.emitted :], None, None)
                running.emitted = len(running.made)
            if done:
                self._end(request_id, "length")
        records, partials = self.pop_reports()
        return {"finished_request_records": records, "partial_outputs": partials}

    def pop_reports(self) -> tuple[list[DynamicInferenceRequestRecord], dict[int, PartialOutput]]:
        reports = self._finished, self._partials
        self._finished, self._partials = [], {}
        return reports

    def suspend(self) -> None:
        self.is_suspended = True

    def barrier(self, occasion: str) -> None:
        """No effect: there are no other ranks."""

    def resume(self) -> None:
        self.is_suspended = False

    def set_generation_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def increment_staleness(self) -> None:
        self.staleness += 1

    def invalidate_prefix_cache(self) -> None:
        self.prefix_resets += 1

    def note_finished(self, request: DynamicInferenceRequest) -> None:
        self.ledger.append(request.uid)

    def start_profiler(self) -> None:
        self.profiles.append("start")

    def stop_profiler(self) -> None:
        self.profiles.append("stop")

    def stats(self) -> EngineStats:
        load = EngineStats(len(self._running), 0, 100, len(self._running), 0, self.steps, 0)
        return replace(load, weight_version=self.weight_version)

    @property
    def own_adapters(self) -> list[tuple[str, str]]:
        return self.own

    def assign_adapters(self, entries: Sequence[AdapterEntry]) -> None:
        if any(entry.path == self.refuses for entry in entries):
            raise CheckpointError(f"{self.refuses}: not an adapter")
        self.adapters = list(entries)

    def update_weights(self, weights: Any, *, version: int | None) -> int:
        if weights == self.refuses:
            raise CheckpointError(f"{weights}: not a checkpoint")
        self.weights.append(weights)
        self.weight_version = self.weight_version + 1 if version is None else version
        return self.weight_version

    def _end(self, request_id: int, reason: str) -> None:
        running = self._running.pop(request_id)
        request = running.record[0]
        request.generated_tokens = running.made
        request.generated_text = " ".join(map(str, running.made))
        request.finish_reason = reason
        request.status = Status.COMPLETED if reason == "length" else Status.FAILED
        self._finished.append(running.record)


@dataclass
class StuckEngine(FakeEngine):
    """Its steps wait until the event is set."""

    let_go: threading.Event = field(default_factory=threading.Event)

    def step_modern(self) -> dict[str, Any]:
        self.let_go.wait(30)
        return super().step_modern()
