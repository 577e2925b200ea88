"""The four forms of prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_runtime.errors import InvalidRequestError
from megatron_runtime.sampling_params import SamplingParams
from megatron_runtime.wire.bodies import Prompt

Prompts = str | list[int] | list[str] | list[list[int]]


def split_prompts(prompts: Any) -> tuple[list[Prompt], bool]:
    """The prompts as a list, and whether a single prompt was given instead of a batch.

    Raises:
        TypeError: Neither text, token ids, a list of texts, nor a list of token id lists.
    """
    if isinstance(prompts, str):
        return [prompts], True
    if not isinstance(prompts, list):
        raise TypeError(_wrong_type(f"a {type(prompts).__name__}"))
    if not prompts:
        return [], False
    if all(_is_token(item) for item in prompts):
        return [prompts], True
    if all(isinstance(item, str) for item in prompts):
        return prompts, False
    if all(isinstance(item, list) and all(_is_token(token) for token in item) for item in prompts):
        return prompts, False
    raise TypeError(_wrong_type(f"a list of {', '.join(sorted({type(item).__name__ for item in prompts}))}"))


def refuse_media(multi_modal_data: Any) -> None:
    """Raise InvalidRequestError if there are media."""
    if multi_modal_data is not None:
        raise InvalidRequestError(
            "multi_modal_data: the supported models read text only; omit it", field="multi_modal_data"
        )


def params_for(
    prompts: Sequence[Prompt], given: SamplingParams | Sequence[SamplingParams] | None
) -> list[SamplingParams]:
    """One set of parameters per prompt.

    Raises:
        InvalidRequestError: The list has another length than the prompts.
    """
    if given is None or isinstance(given, SamplingParams):
        return [given or SamplingParams()] * len(prompts)
    if len(given) != len(prompts):
        raise InvalidRequestError(
            f"sampling_params has {len(given)} entries for {len(prompts)} prompts; give one for each, or a single one",
            field="sampling_params",
        )
    return list(given)


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _wrong_type(found: str) -> str:
    return f"prompts must be text, a list of token ids, a list of texts or a list of token id lists, not {found}"
