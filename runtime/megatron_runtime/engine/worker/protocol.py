"""Protocols between engines and the loops that run them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from megatron_runtime.headers import EngineState
from megatron_runtime.sampling_params import SamplingParams

if TYPE_CHECKING:
    from megatron_runtime.config import InferenceConfig
    from megatron_runtime.engine.admission import Prompt
    from megatron_runtime.engine.request_book import Reports
    from megatron_runtime.engine.request_future import RequestFuture
    from megatron_runtime.engine.step_result import EngineStats, StepResult
    from megatron_runtime.model.refit import Weights
    from megatron_runtime.parallel.ranks import Ranks


class RequestEngine(Protocol):
    """The methods of an engine for requests."""

    def add_request(
        self, request_id: int, prompt: Any, sampling_params: SamplingParams | None, *, generated: Sequence[int]
    ) -> Any: ...
    def abort_request(self, request_id: int) -> bool: ...


class WeightEngine(Protocol):
    """The methods of an engine for weights."""

    def update_weights(self, weights: Weights, *, version: int | None) -> int: ...


class Engine(RequestEngine, WeightEngine, Protocol):
    """The engine of an `EngineLoop`: a DynamicInferenceEngine or a LockStepEngine."""

    def has_unfinished_requests(self) -> bool: ...
    def step_modern(self) -> Any: ...
    def pop_reports(self) -> tuple[list[Any], Mapping[int, Any]]: ...
    def fail_all_requests(self, error: Exception) -> None: ...
    def suspend(self) -> None: ...
    def resume(self) -> None: ...
    def barrier(self, occasion: str) -> None: ...
    def stats(self) -> Any: ...


class AttachedLoop(Protocol):
    """The loop that runs an engine for a coordinator."""

    failure: BaseException | None
    ended: bool

    @property
    def state(self) -> EngineState: ...
    async def wait_until(self, *states: EngineState) -> EngineState: ...
    async def update_weights(self, weights: Weights) -> int: ...


class RankEngine(Engine, Protocol):
    """The engine of one rank of a replica group."""

    @property
    def config(self) -> InferenceConfig: ...
    @property
    def ranks(self) -> Ranks: ...
    @property
    def weight_version(self) -> int: ...
    @property
    def attached_loop(self) -> AttachedLoop | None: ...

    def add_request(
        self,
        request_id: int,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        generated: Sequence[int] = (),
    ) -> RequestFuture: ...
    def update_weights(self, weights: Weights, *, version: int | None = None) -> int: ...
    def step_modern(self) -> StepResult: ...
    def pop_reports(self) -> Reports: ...
    def stats(self) -> EngineStats: ...
    def attach(self, loop: AttachedLoop) -> None: ...
