"""One choice of an answer: the task, and the deltas of its result."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from megatron_runtime.sampling_params import SamplingParams, token_of_key


class TokenLogProb(NamedTuple):
    """A token with its log probability, and the most likely tokens of its position, descending."""

    token: int
    log_prob: float
    top: Mapping[int, float]
    begins_text: bool = False
    """Whether it is the first token of the text, which some tokenizers begin without the token's space."""

    def limited(self, count: int) -> TokenLogProb:
        """With at most this number of the most likely tokens."""
        return self if len(self.top) <= count else self._replace(top=dict(islice(self.top.items(), count)))


class Delta(NamedTuple):
    """New text of one choice. The last delta of a choice has the finish reason and the token counts."""

    choice: int
    text: str
    log_probs: tuple[TokenLogProb, ...] = ()
    tokens: tuple[int, ...] = ()
    """The tokens of this text; tokens of an incomplete character come with the delta that completes it."""
    prompt_log_probs: tuple[TokenLogProb, ...] = ()
    """Of the prompt's tokens from the second on, if requested: in the first delta."""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    """The stop string, or the token of ``stop_token_ids``, that ended the choice; in its last delta."""
    generated_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""
    weight_version: int = 0
    """Version of the weights that generated the choice; set in its last delta."""
    embedding: Sequence[float] | None = None
    """The pooled hidden states, if the task asks for them: in the last delta."""
    routing: Sequence[Sequence[Sequence[int]]] | None = None
    """The experts of each token but the last, per layer with experts, if the engine records them; in the last delta."""


@dataclass(frozen=True)
class ChoiceTask:
    """What to generate for one choice."""

    index: int
    prompt: Sequence[int]
    params: SamplingParams
    """Shared by choices, and so without a seed."""
    seed: int | None = None
    """None: chosen when the choice is submitted."""
    shares_body: bool = False
    """Whether other choices have the same prompt and parameters."""
    uuid: bytes | None = None
    """UUID of the request to the coordinator if the client sent an idempotency key; otherwise generated."""
    with_every_token: bool = False
    """Whether the end-of-sequence token has a log probability too, so that there is one for each token."""
    shown: frozenset[int] = frozenset()
    """Special tokens to keep in the text."""
    top_n: int | None = None
    """Number of most likely tokens to report with each log probability of the answer; None for no log probabilities."""

    @property
    def wants_scored_prompt(self) -> bool:
        """Whether log probabilities of the prompt are requested."""
        return self.params.return_log_probs and not self.params.skip_prompt_log_probs


def token_log_probs(
    tokens: Sequence[int], values: Iterable[float] | None, tops: Sequence[Mapping[str, float]] | None
) -> tuple[TokenLogProb, ...]:
    """One per value in ``values``; without most likely tokens where ``tops`` is None."""
    numbers = [float(value) for value in (() if values is None else values)]
    if not numbers:
        return ()
    likely = [{token_of_key(key): value for key, value in top.items()} for top in tops or [{}] * len(tokens)]
    return tuple(TokenLogProb(*entry) for entry in zip(tokens, numbers, likely, strict=False))
