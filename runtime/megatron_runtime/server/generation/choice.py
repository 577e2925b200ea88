"""One choice of an answer: what is to be generated, and the pieces in which it comes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_runtime.sampling_params import SamplingParams


class TokenLogProb(NamedTuple):
    """A generated token with its log probability, and those of the likeliest tokens in its place by their text."""

    token: int
    log_prob: float
    top: Mapping[str, float]


class Delta(NamedTuple):
    """New text of one choice. The last one of a choice has a finish reason and the numbers of tokens."""

    choice: int
    text: str
    log_probs: tuple[TokenLogProb, ...] = ()
    tokens: tuple[int, ...] = ()
    """The tokens that this text came from, but never half of what begins a character."""
    prompt_log_probs: tuple[TokenLogProb, ...] = ()
    """Of the prompt's tokens from the second on, if they are asked for: with the first delta, be it the last one."""
    finish_reason: str | None = None
    generated_tokens: int = 0
    cached_tokens: int = 0
    """Of the prompt, those that were not computed."""
    weight_version: int = 0
    """Of the weights with which a choice that has ended was made."""


@dataclass(frozen=True)
class ChoiceTask:
    """What to generate for one choice."""

    index: int
    prompt: Sequence[int]
    params: SamplingParams
    uuid: bytes | None = None
    """Its name towards the coordinator, if the client may send it again under the same one."""
    with_every_token: bool = False
    """Log probabilities count the token that ended the answer too, so that there is one for each token."""
    shown: frozenset[int] = frozenset()
    """Special tokens that the text has nevertheless."""

    @property
    def wants_scored_prompt(self) -> bool:
        """Whether the prompt's tokens have log probabilities too."""
        return self.params.return_log_probs and not self.params.skip_prompt_log_probs


def token_log_probs(
    tokens: Sequence[int], values: Iterable[float] | None, tops: Sequence[Mapping[str, float]] | None
) -> tuple[TokenLogProb, ...]:
    """As many as there are values; those without likeliest tokens have none."""
    numbers = [float(value) for value in (() if values is None else values)]
    if not numbers:
        return ()
    likeliest = tops or [{}] * len(tokens)
    return tuple(TokenLogProb(*entry) for entry in zip(tokens, numbers, likeliest, strict=False))
