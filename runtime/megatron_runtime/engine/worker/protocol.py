"""What the loops of this folder need of an engine, and what an engine sees of its loop."""

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


class RequestTaker(Protocol):
    """The part of an engine that takes requests."""

    def add_request(
        self, request_id: int, prompt: Any, sampling_params: SamplingParams | None, *, generated: Sequence[int]
    ) -> Any: ...
    def abort_request(self, request_id: int) -> bool: ...


class WeightTaker(Protocol):
    """The part of an engine that takes weights."""

    def update_weights(self, weights: Weights, *, version: int | None) -> int: ...


class Engine(RequestTaker, WeightTaker, Protocol):
    """What `EngineLoop` needs of an engine; DynamicInferenceEngine and LockStepEngine have it."""

    def has_unfinished_requests(self) -> bool: ...
    def step_modern(self) -> Any: ...
    def take_reports(self) -> tuple[list[Any], Mapping[int, Any]]: ...
    def fail_all_requests(self, error: Exception) -> None: ...
    def suspend(self) -> None: ...
    def resume(self) -> None: ...
    def barrier(self, occasion: str) -> None: ...
    def stats(self) -> Any: ...


class AttachedLoop(Protocol):
    """What an engine, and those who wait for it, see of the loop that runs it for a coordinator."""

    failure: BaseException | None
    ended: bool

    @property
    def state(self) -> EngineState: ...
    async def wait_until(self, *states: EngineState) -> EngineState: ...
    async def update_weights(self, weights: Weights) -> int: ...


class RankEngine(Engine, Protocol):
    """The engine of one rank, which may be one of several that serve the same model."""

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
    def take_reports(self) -> Reports: ...
    def stats(self) -> EngineStats: ...
    def attach(self, loop: AttachedLoop) -> None: ...
