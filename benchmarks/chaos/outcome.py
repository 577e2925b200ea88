"""The outcome of one request of the load."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class SeenError:
    """An error that the program saw after the retries of its client.

    ``status`` is the HTTP status, if any; ``interrupted``: a stream had begun, so that the client did not retry.
    """

    kind: str
    status: int | None
    message: str
    retryable: bool
    interrupted: bool

    def __str__(self) -> str:
        return self.kind if self.status is None else f"{self.kind} {self.status}"


@dataclass(frozen=True)
class RequestOutcome:
    """``seconds`` is the time to the complete answer, including retries; ``at`` is its start, as ``time.time``.

    ``text`` is None if the program gave up; ``retries`` counts those of the client, which the program does not see.
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
    def of(cls, line: Mapping[str, Any]) -> RequestOutcome:
        """The outcome in a parsed line of the load's file."""
        return cls(**{**line, "errors": tuple(SeenError(**error) for error in line["errors"])})

    def is_correct(self, answers: Mapping[int, str]) -> bool:
        """Whether the program got the correct answer to its question."""
        return self.text is not None and self.text == answers[self.question]


def read(lines: Iterable[str]) -> list[RequestOutcome]:
    """All outcomes in a load's file, except for an incomplete line."""
    return [RequestOutcome.of(json.loads(line)) for line in lines if line.endswith("\n")]
