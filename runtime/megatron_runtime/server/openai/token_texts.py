"""Texts and bytes of single tokens in log probabilities."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_runtime.model.tokenizer import Tokenizer
from megatron_runtime.sampling_params import token_key
from megatron_runtime.server.generation.choice import TokenLogProb


class TokenTexts:
    """Describes tokens for the fields of log probabilities.

    Joined in order, the bytes of an answer's tokens are those of its text: a token can be a part of a character.

    Args:
        tokenizer: The model's.
        as_ids: Writes ``token_id:N`` instead of texts, as vLLM's ``return_tokens_as_token_ids``.
    """

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def data(self, token: int, *, begins_text: bool = False) -> bytes:
        """The bytes of a token; ``begins_text`` as in TokenLogProb."""
        found = self._tokenizer.token_bytes(token)
        return found.removeprefix(b" ") if begins_text else found

    def text(self, token: int, *, begins_text: bool = False) -> str:
        """The text of a token; U+FFFD stands for parts of characters."""
        if self._as_ids:
            return token_key(token)
        return self.data(token, begins_text=begins_text).decode(errors="replace")

    def by_text(self, entry: TokenLogProb) -> dict[str, float]:
        """The most likely tokens of a position: text to log probability.

        Several tokens can have the same text: the most likely one has it, the others ``token_id:N``.
        """
        named: dict[str, float] = {}
        for token, value in entry.top.items():
            text = self.text(token, begins_text=entry.begins_text)
            named[text if text not in named else token_key(token)] = value
        return named

    def scored(self, entry: TokenLogProb) -> dict[str, Any]:
        """A token with its log probability, its bytes, and the most likely tokens, in the format of chats."""
        begins = entry.begins_text
        tops = [self._scored(token, value, begins_text=begins) for token, value in entry.top.items()]
        return {**self._scored(entry.token, entry.log_prob, begins_text=begins), "top_logprobs": tops}

    def prompt_scores(self, entries: tuple[TokenLogProb, ...], count: int) -> list[dict[str, Any] | None]:
        """vLLM's ``prompt_logprobs``: for each token of a prompt, the token itself and the ``count`` most likely ones.

        The first token has none. The rank of a token that is not among the most likely ones is null.
        """
        return [None, *(self._ranked(entry, entry.limited(count).top) for entry in entries)]

    def _ranked(self, entry: TokenLogProb, top: Mapping[int, float]) -> dict[str, Any]:
        ranks = {token: rank for rank, token in enumerate(entry.top, 1)}
        scores = {entry.token: entry.log_prob} | dict(top)
        return {
            str(token): {
                "logprob": value,
                "rank": ranks.get(token),
                "decoded_token": self.data(token).decode(errors="replace"),
            }
            for token, value in scores.items()
        }

    def _scored(self, token: int, log_prob: float, *, begins_text: bool) -> dict[str, Any]:
        text = self.text(token, begins_text=begins_text)
        return {"token": text, "logprob": log_prob, "bytes": list(self.data(token, begins_text=begins_text))}
