"""Serves a list of prompts, step by step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from megatron_runtime.engine.admission import Prompt
from megatron_runtime.engine.step_result import StepResult
from megatron_runtime.inference_request import DynamicInferenceRequestRecord
from megatron_runtime.sampling_params import SamplingParams


class SteppedEngine(Protocol):
    """The methods of an engine that `serve_batch` uses."""

    def add_request(self, request_id: int, prompt: Prompt, sampling_params: SamplingParams, /) -> Any: ...
    def step_modern(self) -> StepResult: ...


def serve_batch(
    engine: SteppedEngine,
    ids: Iterator[int],
    prompts: Sequence[Prompt],
    sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
) -> list[DynamicInferenceRequestRecord]:
    """Serve prompts in this thread; one set of parameters for all, or one each.

    The records are in the order of the prompts, with the ``n`` samples of a prompt side by side.

    Args:
        engine: Not stepped by others meanwhile.
        ids: Ids that no unfinished request has.
        prompts: Texts or token ids.
        sampling_params: None means the defaults.

    Raises:
        TypeError: prompts is a string instead of a list.
    """
    if isinstance(prompts, str):
        raise TypeError("prompts must be a list of prompts, not a string")
    if sampling_params is None or isinstance(sampling_params, SamplingParams):
        sampling_params = [sampling_params or SamplingParams()] * len(prompts)
    pairs = zip(prompts, sampling_params, strict=True)
    samples = [(next(ids), prompt, sample) for prompt, params in pairs for sample in params.samples()]
    for request in samples:
        engine.add_request(*request)
    request_ids = [request_id for request_id, _, _ in samples]
    done: dict[int, DynamicInferenceRequestRecord] = {}
    while any(request_id not in done for request_id in request_ids):
        done |= {record.request_id: record for record in engine.step_modern()["finished_request_records"]}
    return [done[request_id] for request_id in request_ids]
