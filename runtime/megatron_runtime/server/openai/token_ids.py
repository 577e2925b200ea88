"""Token ids in answers, for clients that continue with exactly the generated tokens."""

from __future__ import annotations

from typing import Any

from megatron_runtime.model.tokenizer import Tokenizer
from megatron_runtime.server.generation.choice import Delta
from megatron_runtime.server.openai.answer import Answer


class TokenIds:
    """The requested fields: vLLM's with ``return_token_ids``, Megatron's with ``return_tokenized_data`` and
    ``return_raw_text``.

    One instance per answer: it accumulates the tokens of a stream.
    """

    def __init__(self, answer: Answer, tokenizer: Tokenizer) -> None:
        self._answer = answer
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}
        self._made: dict[int, list[int]] = {}
        self._log_probs: dict[int, list[float]] = {}

    def of_prompt(self, choice: int) -> dict[str, Any]:
        """``prompt_token_ids`` of a choice."""
        body = self._answer.body
        return {"prompt_token_ids": self._answer.prompt_of(choice)} if body.return_token_ids else {}

    def of_piece(self, delta: Delta) -> dict[str, Any]:
        """``token_ids``: the new tokens of a delta."""
        return {"token_ids": list(delta.tokens)} if self._answer.body.return_token_ids else {}

    def of_whole(self, delta: Delta) -> dict[str, Any]:
        """All tokens of a choice, returned for its last delta. Call it with every delta."""
        return self._tokenized(delta) | self._raw_text(delta)

    def of_routing(self, delta: Delta) -> dict[str, Any]:
        """``moe_topk_indices``, Megatron's field for the experts of each token, and the same for the prompt alone."""
        if delta.routing is None:
            return {}
        prompt = len(self._answer.prompt_of(delta.choice))
        return {"moe_topk_indices": delta.routing, "prompt_moe_topk_indices": delta.routing[:prompt]}

    def _raw_text(self, delta: Delta) -> dict[str, Any]:
        """``raw_text``: the prompt with its special tokens, and the answer before it is parsed."""
        if not self._answer.body.return_raw_text:
            return {}
        self._texts[delta.choice] = self._texts.get(delta.choice, "") + delta.text
        if delta.finish_reason is None:
            return {}
        prompt = self._tokenizer.detokenize(self._answer.prompt_of(delta.choice), skip_special_tokens=False)
        return {"raw_text": prompt + self._texts[delta.choice]}

    def _tokenized(self, delta: Delta) -> dict[str, Any]:
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
