"""Formats of tool calls, by the names of vLLM's tool parsers."""

from __future__ import annotations

import random
import re
import string
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from megatron_runtime.call_format import CallFormat
from megatron_runtime.server.messages.message_parts import PartParser
from megatron_runtime.server.messages.tool_parsers import hermes, llama3_json, mistral, pythonic, qwen3_coder
from megatron_runtime.server.messages.tool_parsers.qwen3_coder import Schemas


def _call_id() -> str:
    return f"call_{uuid.uuid4().hex}"


def _short_call_id() -> str:
    """Nine letters and digits: Mistral's templates reject other ids."""
    return "".join(random.choices(string.ascii_letters + string.digits, k=9))


@dataclass(frozen=True)
class ToolFormat:
    """One format of tool calls."""

    name: str
    parser: Callable[[Schemas], PartParser]
    """Creates a parser for one answer, given the schema of each function's arguments."""
    markers: tuple[str, ...]
    """Texts that delimit calls; they may be special tokens of the model."""
    template_markers: tuple[tuple[str, ...], ...] = ()
    """A chat template uses this format if it has all texts of any of these tuples."""
    call_format: CallFormat | None = None
    """Format for a grammar that enforces calls; None if that is not supported."""
    call_id: Callable[[], str] = _call_id
    unmarked: str = ""
    """Regular expression for the beginning of a call without a marker; empty if every call has one."""

    def begins_call(self, text: str) -> bool:
        """Whether the text that a parser held back at the end of an answer is the beginning of a call."""
        text = text.lstrip()
        if self.unmarked and re.match(self.unmarked, text):
            return True
        # One character may be content.
        return any(text.startswith(marker) or (len(text) > 1 and marker.startswith(text)) for marker in self.markers)


HERMES = ToolFormat(
    "hermes",
    lambda _: hermes.HermesParser(),
    (hermes.BEGIN, hermes.END),
    (("<tool_call>",),),
    CallFormat(begin="<tool_call>\n", end="\n</tool_call>", separator="\n"),
)
TOOL_FORMATS = {
    tool_format.name: tool_format
    for tool_format in (
        HERMES,
        ToolFormat(
            "llama3_json",
            lambda _: llama3_json.Llama3JsonParser(),
            (llama3_json.TAG,),
            (("<|python_tag|>",), ('{"name": function name, "parameters": ',)),
            CallFormat(separator="; ", arguments="parameters"),
            unmarked=r'\{\s*"(name|type|parameters)"',
        ),
        ToolFormat(
            "mistral",
            lambda _: mistral.MistralParser(),
            (mistral.MARKER, mistral.ARGUMENTS, mistral.CALL_ID),
            ((mistral.MARKER,),),
            CallFormat(opening=f"{mistral.MARKER}[", separator=", ", closing="]"),
            _short_call_id,
        ),
        ToolFormat(
            "pythonic",
            lambda _: pythonic.PythonicParser(),
            (pythonic.BEGIN, pythonic.END),
            (("[func_name1(params_name1=params_value1",),),
            unmarked=r"\[\s*[A-Za-z_][\w.]*\(",
        ),
        ToolFormat(
            "qwen3_coder",
            qwen3_coder.Qwen3CoderParser,
            (qwen3_coder.BEGIN, qwen3_coder.END),
            unmarked=re.escape(qwen3_coder.FUNCTION),
            template_markers=((qwen3_coder.FUNCTION, qwen3_coder.PARAMETER),),
        ),
    )
}


def format_of_template(source: str) -> ToolFormat | None:
    """The format that a chat template uses; None if it is unknown."""
    # Last, because Qwen3-Coder uses the markers of Hermes too.
    for tool_format in (*(each for each in TOOL_FORMATS.values() if each is not HERMES), HERMES):
        if any(all(text in source for text in texts) for texts in tool_format.template_markers):
            return tool_format
    return None
