"""What all answers have in common: their head and their count of tokens."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Usage:
    """Tokens of prompts and of generated text."""

    prompt_tokens: int
    completion_tokens: int

    def body(self) -> dict[str, int]:
        """As OpenAI's API writes it."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }


@dataclass(frozen=True)
class Answer:
    """One answer to one HTTP request; all chunks of a stream share it."""

    model: str
    prompt_tokens: int
    id_prefix: str
    number: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def head(self, kind: str) -> dict[str, Any]:
        """The fields that come before the choices."""
        return {
            "id": f"{self.id_prefix}-{self.number}",
            "object": kind,
            "created": self.created,
            "model": self.model,
        }
