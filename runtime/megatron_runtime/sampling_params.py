"""How one request wants its tokens chosen, and when it wants to stop."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from megatron_runtime.errors import InvalidRequestError

_SEED_LIMIT = 2**64
_PRIORITY_LIMIT = 2**31
_LARGEST_BIAS = 100.0
_LONGEST_ID = 18
"""Digits of a token id; Python itself refuses to read some thousands of them."""
_UNAVAILABLE = {
    "return_segments": "texts of single tokens are not reported; detokenize generated_tokens one by one",
    "do_kv_handoff": "one engine computes both prompt and answer; leave it out",
}


@dataclass
class SamplingParams:
    """How one request wants its tokens chosen, and when it wants to stop.

    Raises:
        InvalidRequestError: A value out of its range, naming field, value and range.
    """

    temperature: float = 1.0
    """Divides the logits before sampling; 0 always takes the likeliest token."""
    top_k: int = 0
    """Sample among the k likeliest tokens; 0 means all, 1 always takes the likeliest."""
    top_p: float = 0.0
    """Sample among the fewest likeliest tokens that together have this probability; 0 and 1 mean all."""
    min_p: float = 0.0
    """Sample among tokens at least this times as likely as the likeliest; 0 means all."""
    repetition_penalty: float = 1.0
    """Divides a token's logit where it is positive, and multiplies it where not, if prompt or answer have the token."""
    frequency_penalty: float = 0.0
    """Lowers a token's logit by this for every time that the answer has the token."""
    presence_penalty: float = 0.0
    """Lowers a token's logit by this if the answer has the token."""
    logit_bias: dict[int, float] | None = None
    """Added to the logits of these tokens, before any penalty; 100 all but forces a token, -100 all but forbids it."""
    priority: int = 0
    """Requests with a lower one are admitted first, and the last to give way when memory runs out."""
    n: int = 1
    """Answers per prompt that ``generate`` gives, one request each, as ``samples`` says."""
    seed: int | None = None
    """Fixes the noise; None lets the engine choose one when the request is submitted."""
    num_tokens_to_generate: int | None = None
    """Most tokens to generate; None means as many as the engine's sequence length leaves. 0 only scores the prompt."""
    num_tokens_total: int | None = None
    """Most tokens of prompt and answer together; excludes ``num_tokens_to_generate``."""
    min_tokens: int = 0
    """Tokens that the answer has before anything but its length may end it; stop texts complete by then don't count."""
    grammar: str | None = None
    """Keeps the answer to a grammar; ``megatron_runtime.guides`` makes it of a JSON schema, regex, choices or Lark."""
    termination_id: int | None = None
    """A token that ends the answer, instead of the tokenizer's own; -1 means none."""
    ignore_eos: bool = False
    """Goes on after the token that would end the answer."""
    stop_words: list[str] | None = None
    """Texts that end the answer wherever they appear in it."""
    stop: list[str] | None = None
    """Another name of ``stop_words``."""
    stop_token_ids: list[int] | None = None
    """Further tokens that end the answer, also with ``ignore_eos``."""
    detokenize_stop_sequence: bool = False
    """Keeps the stop text, or the text of the token that ended the answer, in the generated text."""
    return_log_probs: bool = False
    """Reports the log probability of every token."""
    skip_prompt_log_probs: bool = False
    """Leaves the prompt's tokens out of the log probabilities."""
    top_n_logprobs: int = 0
    """With ``return_log_probs``, also reports this many likeliest tokens per position."""
    return_prompt_top_n_logprobs: bool | None = None
    """Whether these are reported for the prompt too. Leave it out: it follows from ``skip_prompt_log_probs``."""
    add_BOS: bool = False  # noqa: N815 - the name that Megatron's users know
    """Puts the tokenizer's start token before a prompt that is given as text."""
    return_prompt_tokens: bool = False
    """Sends the prompt's tokens back with the reply."""
    streaming: bool = False
    """Reports tokens as they come."""
    streaming_interval: int = 1
    """With ``streaming``, reports at least this many tokens at a time."""
    return_segments: bool = False
    """Only False: texts of single tokens are not reported; ``top_n_logprobs`` has those of the likeliest."""
    do_kv_handoff: bool = False
    """Only False: prompts and answers are computed by the same engine, which has no keys and values to hand over."""

    def __post_init__(self) -> None:
        self._join_stop_names(self.stop, self.stop_words)
        self._validate()

    @property
    def is_greedy(self) -> bool:
        """True if no noise is involved: the likeliest token is always taken."""
        return self.temperature == 0 or self.top_k == 1

    def samples(self) -> list[SamplingParams]:
        """The parameters of each of the n answers: the i-th has the seed plus i, so that it can be had alone again."""
        if self.n == 1:
            return [self]
        alone = [copy.deepcopy(self) for _ in range(self.n)]
        for index, params in enumerate(alone):
            params.n = 1
            params.seed = None if self.seed is None else (self.seed + index) % _SEED_LIMIT
        return alone

    def add_attributes(self, attributes: Mapping[str, Any]) -> None:
        """Set several fields at once; all or none are set.

        Raises:
            InvalidRequestError: A field that doesn't exist, or a value out of its range.
        """
        _check_names(attributes)
        changed = copy.copy(self)
        changed.return_prompt_top_n_logprobs = None
        for name, value in attributes.items():
            setattr(changed, name, value)
        if "stop" in attributes or "stop_words" in attributes:
            changed._join_stop_names(attributes.get("stop"), attributes.get("stop_words"))
        changed._validate()
        self.__dict__.update(changed.__dict__)

    def serialize(self) -> dict[str, Any]:
        """All fields as plain values; the keys of ``logit_bias`` are text, as JSON and msgpack want them."""
        values = {name: getattr(self, name) for name in _SERIALIZED}
        if self.logit_bias is not None:
            values["logit_bias"] = {str(token): bias for token, bias in self.logit_bias.items()}
        return values

    @classmethod
    def deserialize(cls, data: Mapping[str, Any]) -> SamplingParams:
        """The parameters that serialize was called on.

        Raises:
            InvalidRequestError: As in add_attributes.
        """
        _check_names(data)
        return cls(**data)

    def __deepcopy__(self, memo: dict[int, Any]) -> SamplingParams:
        """Of the values only the containers can change, and what is in those can't."""
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        twin.stop = twin.stop_words = None if self.stop_words is None else [*self.stop_words]
        twin.stop_token_ids = None if self.stop_token_ids is None else [*self.stop_token_ids]
        twin.logit_bias = None if self.logit_bias is None else {**self.logit_bias}
        return twin

    def _join_stop_names(self, stop: Any, stop_words: Any) -> None:
        if stop and stop_words and _as_list(stop) != _as_list(stop_words):
            raise InvalidRequestError(f"stop={stop!r} and stop_words={stop_words!r} differ; give one", field="stop")
        self.stop = self.stop_words = _as_list(stop_words or stop)

    def _validate(self) -> None:
        values = self.__dict__
        for name, check in _CHECKS.items():
            if values[name] is not _DEFAULTS[name]:
                check(name, values[name])
        self._check_stops()
        self.logit_bias = _biases(self.logit_bias)
        self._check_combinations()

    def _check_combinations(self) -> None:
        if self.num_tokens_to_generate is not None and self.num_tokens_total is not None:
            raise InvalidRequestError(
                f"num_tokens_to_generate={self.num_tokens_to_generate} and num_tokens_total={self.num_tokens_total} "
                "exclude each other; give one",
                field="num_tokens_total",
            )
        if self.num_tokens_to_generate is not None and self.min_tokens > self.num_tokens_to_generate:
            raise InvalidRequestError(
                f"min_tokens={self.min_tokens} is more than num_tokens_to_generate={self.num_tokens_to_generate}",
                field="min_tokens",
            )
        if self.top_n_logprobs > 0 and not self.return_log_probs:
            raise InvalidRequestError(
                f"top_n_logprobs={self.top_n_logprobs} needs return_log_probs=True", field="top_n_logprobs"
            )
        self._check_grammar()
        derived = self.top_n_logprobs > 0 and not self.skip_prompt_log_probs
        if self.return_prompt_top_n_logprobs not in (None, derived):
            raise InvalidRequestError(
                f"return_prompt_top_n_logprobs={self.return_prompt_top_n_logprobs!r} contradicts "
                f"top_n_logprobs={self.top_n_logprobs} with skip_prompt_log_probs={self.skip_prompt_log_probs}; leave "
                "it out",
                field="return_prompt_top_n_logprobs",
            )
        self.return_prompt_top_n_logprobs = derived

    def _check_grammar(self) -> None:
        if self.grammar is None:
            return
        if not isinstance(self.grammar, str) or not self.grammar:
            raise InvalidRequestError(f"grammar={self.grammar!r} must be a text that is not empty", field="grammar")
        # Where a grammar ends, nothing but the end of the answer may follow.
        for name in ("min_tokens", "ignore_eos"):
            if value := getattr(self, name):
                raise InvalidRequestError(f"{name}={value!r} is not possible together with a grammar", field=name)

    def _check_stops(self) -> None:
        if any(not isinstance(text, str) or not text for text in self.stop_words or ()):
            raise InvalidRequestError(f"stop={self.stop!r} must be a list of non-empty texts", field="stop")
        ids = self.stop_token_ids
        if ids is not None and not (isinstance(ids, (list, tuple)) and all(_is_integer(i) and i >= 0 for i in ids)):
            raise InvalidRequestError(f"stop_token_ids={ids!r} must be a list of token ids", field="stop_token_ids")


_Check = Callable[[str, Any], None]
"""Raises InvalidRequestError, given the name of a field and a value that is not its default."""


def _number(minimum: float, maximum: float = math.inf) -> _Check:
    def check(name: str, value: Any) -> None:
        fits = isinstance(value, (int, float)) and not isinstance(value, bool) and minimum <= value <= maximum
        if not fits or math.isinf(value):
            raise InvalidRequestError(f"{name}={value!r} must be a number {_range(minimum, maximum)}", field=name)

    return check


def _integer(minimum: int, maximum: float = math.inf) -> _Check:
    def check(name: str, value: Any) -> None:
        if not _is_integer(value) or not minimum <= value <= maximum:
            raise InvalidRequestError(f"{name}={value!r} must be an integer {_range(minimum, maximum)}", field=name)

    return check


def _flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise InvalidRequestError(f"{name}={value!r} must be true or false", field=name)
    if value and name in _UNAVAILABLE:
        raise InvalidRequestError(f"{name}=True: {_UNAVAILABLE[name]}", field=name)


_DEFAULTS = {field.name: field.default for field in fields(SamplingParams)}
_SERIALIZED = [name for name in _DEFAULTS if name != "stop"]
_CHECKS: dict[str, _Check] = {
    "temperature": _number(0.0),
    "repetition_penalty": _number(0.01, 100.0),
    "frequency_penalty": _number(-2.0, 2.0),
    "presence_penalty": _number(-2.0, 2.0),
    "top_p": _number(0.0, 1.0),
    "min_p": _number(0.0, 1.0),
    "top_k": _integer(0),
    "top_n_logprobs": _integer(0),
    "min_tokens": _integer(0),
    "priority": _integer(-_PRIORITY_LIMIT, _PRIORITY_LIMIT - 1),
    "n": _integer(1),
    "streaming_interval": _integer(1),
    "num_tokens_to_generate": _integer(0),
    "num_tokens_total": _integer(1),
    "termination_id": _integer(-1),
    "seed": _integer(0, _SEED_LIMIT - 1),
    "ignore_eos": _flag,
    "detokenize_stop_sequence": _flag,
    "return_log_probs": _flag,
    "skip_prompt_log_probs": _flag,
    "add_BOS": _flag,
    "return_prompt_tokens": _flag,
    "streaming": _flag,
    "return_segments": _flag,
    "do_kv_handoff": _flag,
}
"""What a value must be, field by field. Most requests leave most fields alone, and a default needs no check."""


def _biases(value: Any) -> dict[int, float] | None:
    """Token ids to biases; ids may come as text, since JSON has no other keys."""
    if not value and (value is None or isinstance(value, Mapping)):
        return None
    if not isinstance(value, Mapping):
        raise InvalidRequestError(f"logit_bias={value!r} must map token ids to numbers", field="logit_bias")
    biases: dict[int, float] = {}
    for token, bias in value.items():
        is_id = _is_integer(token) or (
            isinstance(token, str) and token.isascii() and token.isdigit() and len(token) <= _LONGEST_ID
        )
        if not is_id or int(token) < 0:
            raise InvalidRequestError(f"logit_bias: {token!r} is no token id", field="logit_bias")
        is_number = isinstance(bias, (int, float)) and not isinstance(bias, bool)
        if not is_number or not -_LARGEST_BIAS <= bias <= _LARGEST_BIAS:
            raise InvalidRequestError(
                f"logit_bias: {bias!r} for token {token} must be a number {_range(-_LARGEST_BIAS, _LARGEST_BIAS)}",
                field="logit_bias",
            )
        biases[int(token)] = float(bias)
    return biases


def _check_names(attributes: Mapping[str, Any]) -> None:
    unknown = sorted(attributes.keys() - _DEFAULTS.keys())
    if unknown:
        raise InvalidRequestError(f"{unknown[0]} is not a sampling parameter", field=unknown[0])


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _as_list(value: Any) -> list[str] | None:
    if isinstance(value, str):
        return [value]
    if value is not None and not isinstance(value, (list, tuple)):
        raise InvalidRequestError(f"stop={value!r} must be a text or a list of texts", field="stop")
    return list(value) if value else None


def _range(minimum: float, maximum: float) -> str:
    return f"of at least {minimum}" if math.isinf(maximum) else f"from {minimum} to {maximum}"
