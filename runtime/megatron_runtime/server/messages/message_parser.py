"""Parses the text of one answer into the parts of a message."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from megatron_runtime.server.messages.message_parts import CallStart, Content, Part, PartParser, Reasoning, joined
from megatron_runtime.server.messages.reasoning import ReasoningParser


class MessageParser:
    """A ``PartParser`` that combines two: calls are parsed only after the reasoning.

    White space next to calls is dropped.

    Args:
        reasoning: Parses reasoning; None if there is none.
        calls: Parses tool calls; None if there are none.
        most_calls: Maximum number of calls, further ones are dropped; None for no limit.
        begins_call: Whether a text is the beginning of a call.
        requires_call: Whether a grammar permits no text in place of a call.
    """

    def __init__(
        self,
        reasoning: ReasoningParser | None = None,
        calls: PartParser | None = None,
        *,
        most_calls: int | None = None,
        begins_call: Callable[[str], bool] = lambda _: False,
        requires_call: bool = False,
    ) -> None:
        self._reasoning = reasoning
        self._calls = calls
        self._most_calls = most_calls
        self._begins_call = begins_call
        self._requires_call = requires_call
        self._num_calls = 0
        self._space = ""
        self._is_after_call = False

    def push(self, text: str) -> list[Part]:
        """See ``PartParser``."""
        parts: Iterable[Part] = [Content(text)] if self._reasoning is None else self._reasoning.push(text)
        return joined(self._find_calls(parts))

    def finish(self, *, is_cut: bool = False) -> list[Part]:
        """See ``PartParser``.

        The beginning of a call or of a marker at the end is content, or dropped if the text was cut off. If a call is
        required, the end has no content.
        """
        parts: list[Part] = [] if self._reasoning is None else self._reasoning.finish(is_cut=is_cut)
        found = list(self._find_calls(parts))
        if self._calls is not None:
            rest = self._calls.finish()
            found += self._trim(part for part in rest if not (is_cut and self._is_markup(part)))
            if self._num_calls == 0:
                found.append(Content(self._space))
        return joined(part for part in found if not (self._requires_call and isinstance(part, Content)))

    def _is_markup(self, part: Part) -> bool:
        """Whether a part that the parser of calls held back is the beginning of a call or of a marker."""
        if isinstance(part, Content):
            return self._num_calls > 0 or self._begins_call(part.text)
        return isinstance(part, Reasoning)

    def _find_calls(self, parts: Iterable[Part]) -> Iterator[Part]:
        if self._calls is None:
            yield from parts
            return
        for part in parts:
            if isinstance(part, Content):
                yield from self._trim(self._calls.push(part.text))
            else:
                yield part

    def _trim(self, parts: Iterable[Part]) -> Iterator[Part]:
        for part in parts:
            if isinstance(part, Content):
                yield Content(self._trimmed(part.text))
                continue
            if isinstance(part, CallStart):
                self._num_calls += 1
                self._space, self._is_after_call = "", True
            if self._most_calls is None or self._num_calls <= self._most_calls:
                yield part

    def _trimmed(self, text: str) -> str:
        """The text without white space at its end, which is held back because a call may follow."""
        text = text.lstrip() if self._is_after_call else self._space + text
        content = text.rstrip()
        if content:
            self._is_after_call = False
        self._space = text[len(content) :]
        return content
