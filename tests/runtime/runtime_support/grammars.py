"""Answers that follow a grammar without a model."""

from __future__ import annotations

import numpy as np
from llguidance import LLMatcher


def follow(matcher: LLMatcher, tokens: int, *, choose: int = 0) -> None:
    """Extend the answer by so many tokens, or until none is allowed; ``choose`` is the place among the allowed ones."""
    for _ in range(tokens):
        allowed = np.flatnonzero(np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little"))
        if not len(allowed):
            break
        matcher.consume_token(int(allowed[choose]))
