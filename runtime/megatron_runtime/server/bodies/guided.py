"""Structured outputs: from the fields of a request to a grammar."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_runtime.errors import InvalidRequestError
from megatron_runtime.server.bodies.protocol import GenerationBody
from megatron_runtime.server.errors import ApiError

_STRUCTURED = "structured_outputs"


@dataclass(frozen=True)
class OutputConstraint:
    """A grammar that the content of an answer must match."""

    param: str
    """The field that requests it."""
    grammar: str
    is_response_format: bool
    """Whether it is OpenAI's ``response_format``, which permits tool calls instead of content."""


def output_constraint(body: GenerationBody) -> OutputConstraint | None:
    """The constraint on the answer; None for free text.

    Raises:
        ApiError: 400 when it is not supported, or there are several.
    """
    name, schema = body.format
    asked: dict[str, Any] = {
        name: schema,
        "guided_json": body.guided_json,
        "guided_regex": body.guided_regex,
        "guided_choice": body.guided_choice,
        "guided_grammar": body.guided_grammar,
        **_structured(body),
    }
    wanted = [field for field, value in asked.items() if value is not None]
    if not wanted:
        return None
    if len(wanted) > 1:
        raise ApiError(400, f"{wanted[1]}: can't be combined with {wanted[0]}; leave one out", param=wanted[1])
    param = wanted[0]
    try:
        return OutputConstraint(param, _maker(param)(asked[param]), is_response_format=param == name)
    except InvalidRequestError as error:
        raise ApiError(400, f"{param}: {error}", param=param) from error


def _maker(param: str) -> Callable[[Any], str]:
    from megatron_runtime import guides  # Imported here, because most services never use a grammar.

    makers: dict[str, Callable[[Any], str]] = {
        "regex": guides.regex_grammar,
        "choice": guides.choice_grammar,
        "grammar": guides.lark_grammar,
    }
    return makers.get(param.removeprefix("guided_").removeprefix(f"{_STRUCTURED}."), guides.json_schema_grammar)


def _structured(body: GenerationBody) -> dict[str, Any]:
    asked = body.structured_outputs
    if asked is None:
        return {}
    return {
        f"{_STRUCTURED}.json": asked.schema_of_json,
        f"{_STRUCTURED}.json_object": {"type": "object"} if asked.json_object else None,
        f"{_STRUCTURED}.regex": asked.regex,
        f"{_STRUCTURED}.choice": asked.choice,
        f"{_STRUCTURED}.grammar": asked.grammar,
    }
