"""Fields of requests that are sampling parameters. Their ranges and defaults are those of SamplingParams."""

from __future__ import annotations

import math
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, Field

from megatron_runtime.sampling_params import DEFAULTS, LONGEST_SALT, RANGES
from megatron_runtime.server.bodies.limits import AllowedTokens, BadWords, Biases, StopTokens

UNLIMITED = -1
"""A budget that is none, as in vLLM."""


def parameter(name: str, default: Any = None, **limits: Any) -> Any:
    """The field of a sampling parameter.

    Args:
        name: Of the parameter, which has a range.
        default: In place of the parameter's.
        limits: Of pydantic's ``Field``, in place of the range's.
    """
    allowed = RANGES[name]
    taken = {"ge": allowed.minimum, "le": allowed.maximum if math.isfinite(allowed.maximum) else None}
    if isinstance(DEFAULTS[name], float):
        taken["allow_inf_nan"] = False
    return Field(DEFAULTS[name] if default is None else default, **(taken | limits))


class SamplingFields(BaseModel):
    """Fields that are passed on to SamplingParams under their own names."""

    temperature: float = parameter("temperature", le=2)
    top_p: float = parameter("top_p", default=1.0, ge=None, gt=0)
    top_k: int = parameter("top_k", ge=-1)
    min_p: float = parameter("min_p")
    top_n_sigma: float = parameter("top_n_sigma")
    presence_penalty: float = parameter("presence_penalty")
    frequency_penalty: float = parameter("frequency_penalty")
    repetition_penalty: float = parameter("repetition_penalty")
    logit_bias: Biases = Field(default_factory=dict)
    min_tokens: int = parameter("min_tokens")
    bad_words: BadWords = Field(default_factory=list)
    stop_token_ids: StopTokens = Field(default_factory=list)
    ignore_eos: bool = False
    allowed_token_ids: AllowedTokens | None = None
    skip_special_tokens: bool = True
    thinking_token_budget: Annotated[
        int | None, BeforeValidator(lambda budget: None if budget == UNLIMITED else budget)
    ] = parameter("thinking_token_budget")
    priority: int = parameter("priority")
    cache_salt: str | None = Field(None, min_length=1, max_length=LONGEST_SALT)

    def passed_on(self) -> dict[str, Any]:
        """These fields as arguments of SamplingParams."""
        return {name: getattr(self, name) for name in SamplingFields.model_fields}
