"""What the server knows of one format of tool calls."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from megatron_runtime.call_format import CallFormat
from megatron_runtime.server.messages.message_parts import PartParser
from megatron_runtime.server.messages.tool_parsers.tagged import Schemas


def begun(*texts: str) -> str:
    """A regular expression for all of these texts, and for the beginning of one at the end of a text."""
    begins = {text[:length] for text in texts for length in range(1, len(text))}
    return f"(?:{'|'.join(map(re.escape, texts))}|(?:{'|'.join(map(re.escape, sorted(begins)))})$)"


def _call_id() -> str:
    return f"call_{uuid.uuid4().hex}"


@dataclass(frozen=True)
class ToolFormat:
    """One format of tool calls."""

    name: str
    parser: Callable[[Schemas], PartParser]
    """Creates a parser for one answer, given the schema of each function's arguments."""
    markers: tuple[str, ...]
    """Texts that delimit calls; they may be special tokens of the model."""
    template_markers: tuple[tuple[str, ...], ...]
    """A chat template uses this format if it has all texts of any of these tuples."""
    call_format: CallFormat
    """Format for prompts, and for a grammar that enforces calls."""
    call_id: Callable[[], str] = _call_id
    unmarked: str = ""
    """Regular expression for the beginning of a call without a marker, also of one that ends with the text; empty if
    every call has a marker."""
    has_channels: bool = False
    """Whether every answer consists of messages with channels, also without tools."""

    @property
    def example(self) -> str:
        """A call with placeholders, for templates without tool support."""
        return self.call_format.text([("<name of the function>", {"<parameter>": "<value>"})])

    def begins_call(self, text: str) -> bool:
        """Whether the text that a parser held back at the end of an answer is the beginning of a call."""
        text = text.lstrip()
        if any(text.startswith(marker) for marker in self.markers):
            return True
        if len(text) < 2:  # One character may be content.
            return False
        if self.unmarked and re.match(self.unmarked, text):
            return True
        return any(marker.startswith(text) for marker in self.markers)
