"""The fields that all requests have."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, fields
from enum import Enum
from typing import TYPE_CHECKING, Any, Self

from megatron_runtime.inference_request.tensor_codec import decode_field, encode_field
from megatron_runtime.sampling_params import SamplingParams

if TYPE_CHECKING:
    from torch import Tensor


class Status(Enum):
    """The status of a request."""

    WAITING_IN_QUEUE = 1
    ACTIVE_AND_GENERATING_TOKENS = 2
    ACTIVE_BUT_NOT_GENERATING_TOKENS = 3
    COMPLETED = 4
    FAILED = 5


@dataclass(kw_only=True)
class InferenceRequest:
    """One prompt and its answer."""

    request_id: int
    prompt: str | None = None
    sampling_params: SamplingParams | None = None
    inference_parameters: SamplingParams | None = None
    """Old name of ``sampling_params``."""
    prompt_tokens: Any = None
    arrival_time: float | None = None
    status: Status | None = None
    encoder_prompt: str | None = None
    generated_text: str | None = None
    segments: list[str] | None = None
    generated_segments: list[str] | None = None
    generated_sequence_lengths: list[int] | None = None
    generated_tokens: Any = None
    prompt_log_probs: Tensor | list[float] | None = None
    """One value for each prompt token but the first."""
    generated_log_probs: Tensor | list[float] | None = None
    """One value for each generated token."""
    prompt_top_n_logprobs: list[dict[str, float]] | None = None
    generated_top_n_logprobs: list[dict[str, float]] | None = None
    generated_length: int | None = None
    tpot: list[float] | None = None
    """Seconds per output token: of each step that the engine has logged, else their average."""

    def __post_init__(self) -> None:
        if self.inference_parameters is None or self.sampling_params is not None:
            return
        warnings.warn("inference_parameters is the old name of sampling_params", DeprecationWarning, stacklevel=3)
        self.sampling_params = self.inference_parameters

    def serialize(self) -> dict[str, Any]:
        """All fields as plain values for msgpack; tensors are tagged."""
        data = {field.name: encode_field(getattr(self, field.name)) for field in fields(self)}
        data["status"] = self.status.name if self.status else None
        data["sampling_params"] = self.sampling_params.serialize() if self.sampling_params else None
        del data["inference_parameters"]
        return data

    @classmethod
    def deserialize(cls, obj: dict[str, Any]) -> Self:
        """The inverse of serialize."""
        known = cls.__dataclass_fields__
        values = {name: decode_field(value) for name, value in obj.items() if name in known}
        if values.get("status") is not None:
            values["status"] = Status[values["status"]]
        if values.get("sampling_params") is not None:
            values["sampling_params"] = SamplingParams.deserialize(values["sampling_params"])
        request = cls(**values)
        request._post_deserialize(obj)
        return request

    def _post_deserialize(self, obj: dict[str, Any]) -> None:
        """Restore fields that plain values can't represent; for subclasses."""
