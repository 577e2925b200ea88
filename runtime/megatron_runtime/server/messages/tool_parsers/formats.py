"""How models write calls of tools, by the names that vLLM gives these ways."""

from __future__ import annotations

import random
import string
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from megatron_runtime.call_format import CallFormat
from megatron_runtime.server.messages.message_parts import PartReader
from megatron_runtime.server.messages.tool_parsers import hermes, llama3_json, mistral, pythonic, qwen3_coder
from megatron_runtime.server.messages.tool_parsers.qwen3_coder import Schemas


def _call_id() -> str:
    return f"call_{uuid.uuid4().hex}"


def _short_call_id() -> str:
    """Nine letters and digits: Mistral's templates refuse others."""
    return "".join(random.choices(string.ascii_letters + string.digits, k=9))


@dataclass(frozen=True)
class ToolFormat:
    """One way."""

    name: str
    reader: Callable[[Schemas], PartReader]
    """Makes what finds the calls in one answer, given the schema of each function's arguments."""
    marks: tuple[str, ...]
    """Texts that tell calls from words; they may be special tokens of the model."""
    signs: tuple[tuple[str, ...], ...] = ()
    """Texts in a chat template from which it follows, all of any of these."""
    form: CallFormat | None = None
    """How calls are enforced; None where that is not possible in the model's own way."""
    call_id: Callable[[], str] = _call_id


HERMES = ToolFormat(
    "hermes",
    lambda _: hermes.HermesReader(),
    (hermes.BEGIN, hermes.END),
    (("<tool_call>",),),
    CallFormat(begin="<tool_call>\n", end="\n</tool_call>", separator="\n"),
)
TOOL_FORMATS = {
    form.name: form
    for form in (
        HERMES,
        ToolFormat(
            "llama3_json",
            lambda _: llama3_json.Llama3JsonReader(),
            (llama3_json.TAG,),
            (("<|python_tag|>",), ('{"name": function name, "parameters": ',)),
            CallFormat(separator="; ", arguments="parameters"),
        ),
        ToolFormat(
            "mistral",
            lambda _: mistral.MistralReader(),
            (mistral.MARK, mistral.ARGUMENTS, mistral.CALL_ID),
            ((mistral.MARK,),),
            CallFormat(opening=f"{mistral.MARK}[", separator=", ", closing="]"),
            _short_call_id,
        ),
        ToolFormat(
            "pythonic",
            lambda _: pythonic.PythonicReader(),
            (pythonic.BEGIN, pythonic.END),
            (("[func_name1(params_name1=params_value1",),),
        ),
        ToolFormat(
            "qwen3_coder",
            qwen3_coder.Qwen3CoderReader,
            (qwen3_coder.BEGIN, qwen3_coder.END),
            ((qwen3_coder.FUNCTION, qwen3_coder.PARAMETER),),
        ),
    )
}


def format_of_template(source: str) -> ToolFormat | None:
    """The way that a chat template itself shows; None if it shows none that is known."""
    # Qwen3-Coder's calls are within the marks of Hermes.
    for form in (*(form for form in TOOL_FORMATS.values() if form is not HERMES), HERMES):
        if any(all(sign in source for sign in signs) for signs in form.signs):
            return form
    return None
