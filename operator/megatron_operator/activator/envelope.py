"""The fields of a body that an activator uses.

msgspec checks the syntax of the others without building them: a body of 16 MiB takes about 30 ms, and no memory. A
thread would not help the event loop, because msgspec does not release the interpreter lock.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

MAX_NAME_BYTES = 4096
"""Bytes of ``model`` in JSON; longer ones name no model. The message about an unknown model repeats its name."""


class _Fields(msgspec.Struct):
    """Values as JSON, so that a large one costs nothing."""

    model: msgspec.Raw = msgspec.Raw(b"")
    stream: msgspec.Raw = msgspec.Raw(b"")


_DECODER = msgspec.json.Decoder(_Fields)


@dataclass(frozen=True)
class Envelope:
    """What a body says to an activator. Of several fields with the same name the last one counts, as for servers."""

    model: str | None
    """None for a value that is no text."""
    stream: bool
    """Whether the answer is to be an event stream."""

    @classmethod
    def parse(cls, content: bytes | bytearray) -> Envelope | None:
        """None for a body that is not a JSON object by RFC 8259, or nested too deeply."""
        try:
            fields = _DECODER.decode(content)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            return None
        return cls(_text(fields.model), _is_true(fields.stream))


def _text(value: msgspec.Raw) -> str | None:
    if len(value) > MAX_NAME_BYTES:
        return None
    try:
        return msgspec.json.decode(value, type=str)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _is_true(value: msgspec.Raw) -> bool:
    return len(value) == len(b"true") and bytes(value) == b"true"
