"""Answers in Harmony, the format of gpt-oss: messages with a channel each, and calls as messages with a recipient.

The text continues after ``<|start|>assistant``:
``<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.f
<|constrain|>json<|message|>{...}<|call|>``, or the channel ``final`` with the answer and ``<|return|>``.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from enum import Enum, auto

from megatron_runtime.server.messages.markers import split_at
from megatron_runtime.server.messages.message_parts import CallArguments, CallStart, Content, Part, Reasoning
from megatron_runtime.server.messages.tool_parsers.stepped_parser import SteppedParser

START = "<|start|>"
CHANNEL = "<|channel|>"
CONSTRAIN = "<|constrain|>"
MESSAGE = "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
MARKERS = (START, CHANNEL, CONSTRAIN, MESSAGE, *ENDS)

_FUNCTIONS = "functions."
_RECIPIENT = re.compile(r"\bto=(\S+?)(?=\s|<\||$)")
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")
_BEFORE_HEADER = (CHANNEL, CONSTRAIN, MESSAGE, START, "to=")


class _HarmonyState(Enum):
    BEFORE = auto()
    HEADER = auto()
    CONTENT = auto()
    REASONING = auto()
    ARGUMENTS = auto()


class HarmonyParser(SteppedParser):
    """A ``PartParser``. The channel ``analysis`` is reasoning; ``final`` and ``commentary`` are content.

    A message to a function is a call. Text without a header, and a header without a message, is content.

    Args:
        functions: The names of the functions that may be called.
    """

    def __init__(self, functions: Collection[str] = ()) -> None:
        super().__init__()
        self._functions = functions
        self._state = _HarmonyState.BEFORE
        self._header = ""
        self._seen: set[_HarmonyState] = set()
        self._is_new = False
        self._has_arguments = False

    def finish(self) -> list[Part]:
        """See ``PartParser``."""
        match self._state:
            case _HarmonyState.BEFORE | _HarmonyState.HEADER:
                return [Content(self._header + self._held)]
            case _HarmonyState.ARGUMENTS:
                return [] if self._has_arguments else [CallArguments("{}")]
        return [self._part(self._held)]

    def _step(self, parts: list[Part]) -> bool:
        match self._state:
            case _HarmonyState.BEFORE:
                return self._find_header()
            case _HarmonyState.HEADER:
                return self._find_message(parts)
        return self._go_on_in_message(parts)

    def _find_header(self) -> bool:
        rest = self._held.lstrip()
        if any(text.startswith(rest) and rest != text for text in _BEFORE_HEADER):
            return False
        is_header = rest.startswith(_BEFORE_HEADER)
        if is_header:
            self._state = _HarmonyState.HEADER
        else:
            self._begin(_HarmonyState.CONTENT)
        return True

    def _find_message(self, parts: list[Part]) -> bool:
        before, marker, rest = split_at(self._held, (MESSAGE, START, *ENDS))
        if marker is None:
            self._header, self._held = self._header + before, rest
            return False
        header, self._header = self._header + before, ""
        self._held = rest
        if marker == MESSAGE:
            self._begin_message(header, parts)
        elif marker == START:
            # The first marker is the beginning of this header.
            parts.append(Content(header))
            self._header = START
        else:
            parts.append(Content(header + marker))
            self._state = _HarmonyState.BEFORE
        return True

    def _begin_message(self, header: str, parts: list[Part]) -> None:
        found = _RECIPIENT.search(header)
        recipient = "" if found is None else found[1]
        name = recipient.removeprefix(_FUNCTIONS)
        if self._functions and name and (name != recipient or name in self._functions):
            parts.append(CallStart(name))
            self._state, self._has_arguments = _HarmonyState.ARGUMENTS, False
            return
        channel = _CHANNEL_NAME.search(header)
        is_analysis = channel is not None and channel[1] == "analysis"
        self._begin(_HarmonyState.REASONING if is_analysis else _HarmonyState.CONTENT)

    def _begin(self, state: _HarmonyState) -> None:
        self._state, self._is_new = state, True

    def _go_on_in_message(self, parts: list[Part]) -> bool:
        before, marker, self._held = split_at(self._held, (*ENDS, START))
        parts.append(self._part(before))
        if marker is None:
            return False
        if self._state is _HarmonyState.ARGUMENTS and not self._has_arguments:
            parts.append(CallArguments("{}"))
        self._state = _HarmonyState.BEFORE
        if marker == START:
            self._held = START + self._held
        return True

    def _part(self, text: str) -> Part:
        """A piece of the current message; a line break precedes a further message of the same kind."""
        if self._state is _HarmonyState.ARGUMENTS:
            self._has_arguments = self._has_arguments or bool(text.strip())
            return CallArguments(text)
        if text and self._is_new:
            text = "\n" + text if self._state in self._seen else text
            self._seen.add(self._state)
            self._is_new = False
        return Reasoning(text) if self._state is _HarmonyState.REASONING else Content(text)
