"""Parser for reasoning before the answer, by default in ``<think>...</think>``."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from megatron_runtime.server.messages.markers import split_at
from megatron_runtime.server.messages.message_parts import Content, Part, Reasoning

BEGIN = "<think>"
END = "</think>"
_RESPONSE = ("<response>", "</response>")


class _ReasoningState(Enum):
    BEFORE = auto()
    REASONING = auto()
    GAP = auto()
    ANSWER = auto()


@dataclass(frozen=True)
class ReasoningStyle:
    """The markers of a model's reasoning. A grammar enforces the first of each."""

    begins: tuple[str, ...] = (BEGIN,)
    ends: tuple[str, ...] = (END,)
    ends_at: tuple[str, ...] = ()
    """Markers that end the reasoning and belong to the answer."""
    wrapper: tuple[str, str] | None = None
    """Optional markers around the answer after the reasoning."""
    is_certain: bool = False
    """Whether an answer begins with reasoning even if neither the prompt nor the answer has a marker."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that may be special tokens."""
        return (*self.begins, *self.ends, *self.ends_at, *(self.wrapper or ()))


THINK = ReasoningStyle()
REASONING_STYLES = {
    "deepseek_r1": ReasoningStyle(is_certain=True),
    "deepseek_v3": THINK,
    "glm45": THINK,
    "granite": ReasoningStyle(
        ("Here is my thought process:", "Here's my thought process:", BEGIN),
        ("Here is my response:", "Here's my response:", END),
        wrapper=_RESPONSE,
    ),
    "kimi_k2": ReasoningStyle(ends_at=("<|tool_calls_section_begin|>",)),
    "minimax_m2": ReasoningStyle(is_certain=True),
    "qwen3": THINK,
}
"""By the names of vLLM's reasoning parsers."""


class ReasoningParser:
    """A ``PartParser``. White space around the reasoning is dropped.

    Args:
        in_reasoning: The text begins with reasoning even if it has no marker.
        style: The markers.
    """

    def __init__(self, *, in_reasoning: bool, style: ReasoningStyle = THINK) -> None:
        self._style = style
        self._in_reasoning = in_reasoning
        self._state = _ReasoningState.BEFORE
        self._held = ""
        self._has_reasoning = False
        self._is_wrapped = False

    def push(self, text: str) -> list[Part]:
        """See ``PartParser``."""
        self._held += text
        parts: list[Part] = []
        if self._state is _ReasoningState.BEFORE:
            self._find_reasoning()
        if self._state is _ReasoningState.REASONING:
            parts += self._think()
        if self._state is _ReasoningState.GAP:
            self._find_answer()
        if self._state is _ReasoningState.ANSWER:
            parts.append(self._answer())
        return parts

    def finish(self, *, is_cut: bool = False) -> list[Part]:
        """See ``PartParser``. The beginning of a marker at the end is text, or dropped if the text was cut off."""
        if is_cut:
            return []  # All that is held back is white space and the beginning of a marker.
        match self._state:
            case _ReasoningState.BEFORE:
                return [Reasoning(self._held.strip()) if self._in_reasoning else Content(self._held)]
            case _ReasoningState.REASONING:
                return [Reasoning(self._held.rstrip())]
        rest = self._held.lstrip()
        return [Content(rest)] if rest else []

    def _find_reasoning(self) -> None:
        rest = self._held.lstrip()
        begins = self._style.begins
        if any(begin.startswith(rest) and rest != begin for begin in begins):
            return
        found = next((begin for begin in begins if rest.startswith(begin)), None)
        if found is not None or self._in_reasoning:
            self._held = rest.removeprefix(found or "")
            self._state = _ReasoningState.REASONING
        else:
            self._state = _ReasoningState.ANSWER

    def _think(self) -> list[Part]:
        if not self._has_reasoning:
            self._held = self._held.lstrip()
        reasoning, marker, rest = split_at(self._held, (*self._style.ends, *self._style.ends_at))
        text = reasoning.rstrip()
        if marker is None:
            self._held = reasoning[len(text) :] + rest
        else:
            self._state, self._held = _ReasoningState.GAP, marker * (marker in self._style.ends_at) + rest
        self._has_reasoning = self._has_reasoning or bool(text)
        return [Reasoning(text)]

    def _find_answer(self) -> None:
        """Drops the white space before the answer, and its opening marker."""
        rest = self._held.lstrip()
        opening = self._style.wrapper[0] if self._style.wrapper and not self._is_wrapped else ""
        if opening.startswith(rest) and rest != opening:
            return
        if opening and rest.startswith(opening):
            self._is_wrapped = True
            rest = rest.removeprefix(opening).lstrip()
        if rest:
            self._state, self._held = _ReasoningState.ANSWER, rest
        else:
            self._held = ""

    def _answer(self) -> Part:
        text, self._held = self._held, ""
        if self._is_wrapped and self._style.wrapper:
            text, marker, self._held = split_at(text, (self._style.wrapper[1],))
            if marker is not None:
                text, self._held, self._is_wrapped = text + self._held, "", False
        return Content(text)
