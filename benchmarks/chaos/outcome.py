"""What became of one request of the load."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class SeenError:
    """An error that the program itself saw, after all that its client does about errors.

    ``status`` is that of HTTP, where the error had one; ``broken``: a stream had begun, so that the client did not ask
    again by itself.
    """

    kind: str
    status: int | None
    message: str
    retryable: bool
    broken: bool

    def __str__(self) -> str:
        return self.kind if self.status is None else f"{self.kind} {self.status}"


@dataclass(frozen=True)
class Outcome:
    """``seconds`` are those to the whole answer, asking again included; ``at`` is when it began, as ``time.time``.

    ``text`` is None where the program gave up; ``retries`` are those of the client itself, which nobody sees.
    """

    number: int
    streamed: bool
    question: int
    at: float
    seconds: float
    text: str | None
    retries: int
    errors: tuple[SeenError, ...]

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> Outcome:
        """From a line of the load's file, parsed."""
        return cls(**{**line, "errors": tuple(SeenError(**error) for error in line["errors"])})

    def is_right(self, answers: Mapping[int, str]) -> bool:
        """Whether the program has the answer that belongs to the question."""
        return self.text is not None and self.text == answers[self.question]


def read(lines: Iterable[str]) -> list[Outcome]:
    """All of a load's file; a line that is being written is left out."""
    return [Outcome.of(json.loads(line)) for line in lines if line.endswith("\n")]
