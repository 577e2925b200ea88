"""Calls as a header and JSON between special tokens: the formats of DeepSeek-V3, DeepSeek-V3.1 and Kimi K2."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum, auto

from megatron_runtime.server.messages.markers import split_at
from megatron_runtime.server.messages.message_parts import CallArguments, CallStart, Content, Part
from megatron_runtime.server.messages.tool_parsers.json_value import JsonValue
from megatron_runtime.server.messages.tool_parsers.stepped_parser import SteppedParser


@dataclass(frozen=True)
class Section:
    """The texts around the calls of one format."""

    begin: str
    """Before the first call."""
    end: str
    """After the last call."""
    call: str
    """Before each call."""
    call_end: str
    """After each call."""
    separator: str
    """In the header."""
    header: str
    """Regular expression for the text from ``call`` to the arguments, with the group ``name`` and optionally ``id``."""
    fence: str = ""
    """Between the arguments and ``call_end``; optional in the model's text."""

    @property
    def markers(self) -> tuple[str, ...]:
        """The texts that may be special tokens."""
        return (self.begin, self.end, self.call, self.call_end, self.separator)


class _SectionState(Enum):
    CONTENT = auto()
    BETWEEN = auto()
    HEADER = auto()
    ARGUMENTS = auto()
    AFTER = auto()


class SectionedParser(SteppedParser):
    """A ``PartParser``. Text that is not a valid call becomes content.

    The arguments are streamed. A call that has begun without the marker of its section is accepted.
    """

    def __init__(self, section: Section) -> None:
        super().__init__()
        self._section = section
        self._state = _SectionState.CONTENT
        self._opening = ""  # the text since the first marker, until a call begins
        self._value = JsonValue()
        self._ids: set[str] = set()

    def finish(self) -> list[Part]:
        """See ``PartParser``."""
        match self._state:
            case _SectionState.ARGUMENTS | _SectionState.AFTER:
                return []
        return [Content(self._opening + self._held)]

    def _step(self, parts: list[Part]) -> bool:
        match self._state:
            case _SectionState.CONTENT:
                return self._find_section(parts)
            case _SectionState.BETWEEN:
                return self._find_call(parts)
            case _SectionState.HEADER:
                return self._find_arguments(parts)
            case _SectionState.ARGUMENTS:
                return self._go_on_in_arguments(parts)
        return self._find_end()

    def _find_section(self, parts: list[Part]) -> bool:
        before, marker, self._held = split_at(self._held, (self._section.begin, self._section.call))
        parts.append(Content(before))
        if marker is None:
            return False
        self._opening = marker
        self._state = _SectionState.BETWEEN if marker == self._section.begin else _SectionState.HEADER
        return True

    def _find_call(self, parts: list[Part]) -> bool:
        rest = self._held.lstrip()
        section = self._section
        if any(marker.startswith(rest) and marker != rest for marker in (section.call, section.end)):
            return False
        if rest.startswith(section.call):
            self._opening += self._held[: len(self._held) - len(rest)] + section.call
            self._held, self._state = rest[len(section.call) :], _SectionState.HEADER
            return True
        if self._opening:  # no call has followed
            parts.append(Content(self._opening))
        elif rest.startswith(section.end):
            self._held = rest[len(section.end) :]
        self._opening, self._state = "", _SectionState.CONTENT
        return True

    def _find_arguments(self, parts: list[Part]) -> bool:
        before, marker, rest = split_at(self._held, ("{", self._section.call_end))
        if marker is None:
            return False
        header = re.fullmatch(self._section.header, before)
        if marker == "{" and header is not None:
            parts.append(self._call_start(header))
            self._held = "{" + rest
            self._opening, self._value, self._state = "", JsonValue(), _SectionState.ARGUMENTS
        else:
            parts.append(Content(self._opening))
            self._opening, self._state = "", _SectionState.CONTENT
        return True

    def _call_start(self, header: re.Match[str]) -> CallStart:
        known = header.groupdict().get("id")
        if known is None or known in self._ids:
            return CallStart(header["name"])
        self._ids.add(known)
        return CallStart(header["name"], known)

    def _go_on_in_arguments(self, parts: list[Part]) -> bool:
        for at, char in enumerate(self._held):
            added = None if self._value.is_closed else self._value.push(char)
            if added is None:
                self._held, self._state = self._held[at:], _SectionState.AFTER
                return True
            parts.append(CallArguments(added))
        self._held = ""
        return False

    def _find_end(self) -> bool:
        """Drops the end of a call."""
        rest = self._held.lstrip()
        fence, end = self._section.fence, self._section.call_end
        if any(marker.startswith(rest) and marker != rest for marker in (fence, end)):
            return False
        if fence and rest.startswith(fence):
            self._held = rest[len(fence) :]
            return bool(self._held)
        self._held, self._state = rest.removeprefix(end), _SectionState.BETWEEN
        return True


_CALL = "<｜tool▁call▁begin｜>"
_SEPARATOR = "<｜tool▁sep｜>"
_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", _CALL, "<｜tool▁call▁end｜>", _SEPARATOR)

DEEPSEEK_V3 = Section(
    *_DEEPSEEK, rf"\s*(?:function)?\s*{_SEPARATOR}\s*(?P<name>[^\s`<{{]+)\s*(?:```(?:json)?\s*)?", fence="```"
)
DEEPSEEK_V31 = Section(*_DEEPSEEK, rf"\s*(?P<name>[^\s`<{{]+)\s*{_SEPARATOR}\s*")
_KIMI_ARGUMENTS = "<|tool_call_argument_begin|>"
KIMI_K2 = Section(
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_end|>",
    _KIMI_ARGUMENTS,
    rf"\s*(?P<id>(?:functions\.)?(?P<name>[^\s:<{{]+)(?::\d+)?)\s*{re.escape(_KIMI_ARGUMENTS)}\s*",
)
