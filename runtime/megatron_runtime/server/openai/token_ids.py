"""Token ids in answers, for those who go on with exactly the tokens that were generated."""

from __future__ import annotations

from typing import Any

from megatron_runtime.server.generation.choice import Delta
from megatron_runtime.server.openai.answer import Answer


class TokenIds:
    """The fields that a request asked for: vLLM's with ``return_token_ids``, Megatron's with ``return_tokenized_data``.

    One per answer: it remembers what a stream has brought so far.
    """

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._made: dict[int, list[int]] = {}
        self._log_probs: dict[int, list[float]] = {}

    def of_prompt(self, choice: int) -> dict[str, Any]:
        """``prompt_token_ids`` of a choice."""
        body = self._answer.body
        return {"prompt_token_ids": self._answer.prompt_of(choice)} if body.return_token_ids else {}

    def of_piece(self, delta: Delta) -> dict[str, Any]:
        """``token_ids``: what is new in a delta."""
        return {"token_ids": list(delta.tokens)} if self._answer.body.return_token_ids else {}

    def of_whole(self, delta: Delta) -> dict[str, Any]:
        """Everything of a choice, once its last delta has come. To be called with each delta."""
        if not self._answer.body.return_tokenized_data:
            return {}
        made = self._made.setdefault(delta.choice, [])
        made += delta.tokens
        log_probs = self._log_probs.setdefault(delta.choice, [])
        log_probs += [entry.log_prob for entry in delta.log_probs]
        if delta.finish_reason is None:
            return {}
        return {
            "prompt_token_ids": self._answer.prompt_of(delta.choice),
            "generation_token_ids": made,
            "generation_log_probs": log_probs if self._answer.body.top_n_log_probs is not None else None,
        }
