"""What form a request wants its answer to have, as a grammar."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_runtime.errors import InvalidRequestError
from megatron_runtime.server.errors import ApiError
from megatron_runtime.server.protocol import GenerationBody


@dataclass(frozen=True)
class AskedForm:
    """A form that the words of an answer have to keep to."""

    param: str
    """The field that asks for it."""
    grammar: str
    is_format: bool
    """Whether it is OpenAI's field, beside which there may be calls of tools."""


def asked_form(body: GenerationBody) -> AskedForm | None:
    """The form that the answer has to keep to; None for free text.

    Raises:
        ApiError: 400 when it can't be kept to, or there are several.
    """
    name, schema = body.format
    asked: dict[str, Any] = {
        name: schema,
        "guided_json": body.guided_json,
        "guided_regex": body.guided_regex,
        "guided_choice": body.guided_choice,
        "guided_grammar": body.guided_grammar,
    }
    wanted = [field for field, value in asked.items() if value is not None]
    if not wanted:
        return None
    if len(wanted) > 1:
        raise ApiError(400, f"{wanted[1]}: not together with {wanted[0]}; leave one out", param=wanted[1])
    param = wanted[0]
    try:
        return AskedForm(param, _maker(param)(asked[param]), is_format=param == name)
    except InvalidRequestError as error:
        raise ApiError(400, f"{param}: {error}", param=param) from error


def _maker(param: str) -> Callable[[Any], str]:
    from megatron_runtime import guides  # not above: most services are never asked for any

    makers: dict[str, Callable[[Any], str]] = {
        "guided_regex": guides.regex_grammar,
        "guided_choice": guides.choice_grammar,
        "guided_grammar": guides.lark_grammar,
    }
    return makers.get(param, guides.json_schema_grammar)
