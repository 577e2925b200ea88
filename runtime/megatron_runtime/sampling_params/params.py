"""The sampling parameters of a request, with the only statement of their types, defaults and ranges."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any

from megatron_runtime.errors import InvalidRequestError
from megatron_runtime.sampling_params.ranges import Range, checks_of, ranges_of
from megatron_runtime.sampling_params.token_fields import check_ids, checked_biases

SEEDS = 2**64
"""Number of different seeds."""
_PRIORITY_LIMIT = 2**31
LONGEST_SALT = 255
"""Maximum number of characters of a cache salt."""
LONGEST_NAME = 255
"""Maximum number of characters of the name of an adapter."""
LONGEST_MARKER = 64
"""Maximum number of characters of a marker of reasoning."""
_MOST_BAD_WORDS = 1000
MOST_BAD_CHARACTERS = 16_384
"""Maximum number of characters of all bad words together: all of them are tokenized, each twice."""
POOLINGS = ("last", "mean")
"""The values of ``pooling``."""
_UNAVAILABLE = {
    "return_segments": "texts of single tokens are not reported; detokenize generated_tokens one by one",
    "do_kv_handoff": "one engine computes both prompt and answer; leave it out",
}


@dataclass
class SamplingParams:
    """The sampling, the end and the reported values of one answer.

    HTTP requests take the ranges of their fields from here. The fields up to ``do_kv_handoff`` have the order of
    Megatron's class.

    Raises:
        InvalidRequestError: A value is out of its range; the message names the field, the value and the range.
    """

    temperature: Annotated[float, Range(0.0)] = 1.0
    """Divides the logits before sampling; 0 is greedy: the most likely token is always sampled."""
    top_k: Annotated[int, Range(0)] = 0
    """Keep the k most likely tokens; 0 keeps all, 1 is greedy."""
    top_p: Annotated[float, Range(0.0, 1.0)] = 0.0
    """Keep the fewest most likely tokens that together have this probability; 0 and 1 keep all."""
    return_log_probs: bool = False
    """Reports the log probability of every token."""
    skip_prompt_log_probs: bool = False
    """Leaves the prompt's tokens out of the log probabilities."""
    return_segments: bool = False
    """Only False: texts of single tokens are not reported; ``top_n_logprobs`` has those of the most likely."""
    num_tokens_to_generate: Annotated[int | None, Range(0)] = None
    """Most tokens to generate; None means no limit below the maximum sequence length. 0 only scores the prompt."""
    num_tokens_total: Annotated[int | None, Range(1)] = None
    """Most tokens of prompt and answer together; excludes ``num_tokens_to_generate``."""
    termination_id: Annotated[int | None, Range(-1)] = None
    """A token that ends the answer, instead of the tokenizer's own; -1 means none."""
    top_n_logprobs: Annotated[int, Range(0)] = 0
    """With ``return_log_probs``, also reports this many of the most likely tokens per position."""
    return_prompt_top_n_logprobs: bool | None = None
    """Whether the prompt has them too. Leave it out: the value follows from ``skip_prompt_log_probs``."""
    add_BOS: bool = False  # noqa: N815 - the name that Megatron's users know
    """Puts the tokenizer's start token before a prompt that is given as text."""
    stop_words: list[str] | None = None
    """Texts that end the answer wherever they appear in it."""
    detokenize_stop_sequence: bool = False
    """Keeps the stop text, or the text of the token that ended the answer, in the generated text."""
    return_prompt_tokens: bool = False
    """Sends the prompt's tokens back with the reply."""
    streaming: bool = False
    """Reports tokens as they are generated."""
    streaming_interval: Annotated[int, Range(1)] = 1
    """With ``streaming``, reports at least this many tokens at a time."""
    do_kv_handoff: bool = False
    """Only False: one engine computes both prompt and answer, so no keys and values are handed over."""
    min_p: Annotated[float, Range(0.0, 1.0)] = 0.0
    """Keep tokens whose probability is at least this fraction of the highest; 0 keeps all."""
    top_n_sigma: Annotated[float, Range(0.0)] = 0.0
    """Keep tokens whose logit is at most this many standard deviations below the highest; 0 keeps all."""
    repetition_penalty: Annotated[float, Range(0.01, 100.0)] = 1.0
    """Divides positive logits, and multiplies others, of tokens that prompt or answer contain; 1 changes nothing."""
    frequency_penalty: Annotated[float, Range(-2.0, 2.0)] = 0.0
    """Subtracted from a token's logit for each time that the answer contains the token."""
    presence_penalty: Annotated[float, Range(-2.0, 2.0)] = 0.0
    """Subtracted from a token's logit if the answer contains the token."""
    logit_bias: dict[int, float] | None = None
    """Added to the logits of these tokens, before any penalty. 100 practically forces a token, -100 practically
    excludes it."""
    priority: Annotated[int, Range(-_PRIORITY_LIMIT, _PRIORITY_LIMIT - 1)] = 0
    """Requests with a lower one are admitted first and evicted last."""
    n: Annotated[int, Range(1)] = 1
    """Number of answers per prompt of ``generate``, each a separate request; see ``samples``."""
    seed: Annotated[int | None, Range(0, SEEDS - 1)] = None
    """Determines the noise; with None the engine chooses a seed when the request is submitted."""
    min_tokens: Annotated[int, Range(0)] = 0
    """Minimum number of tokens of the answer, unless its length limit is lower. Stop texts before that are ignored."""
    bad_words: list[str] | None = None
    """Texts that the answer must not contain, each a token sequence: the token that would complete one is excluded."""
    grammar: str | None = None
    """The answer's grammar; ``megatron_runtime.guides`` makes one of a JSON schema, regex, choices or Lark."""
    ignore_eos: bool = False
    """Continue after the tokenizer's end token."""
    stop: list[str] | None = None
    """Another name of ``stop_words``."""
    stop_token_ids: list[int] | None = None
    """Further tokens that end the answer, also with ``ignore_eos``."""
    replayed_routing: list[list[list[int]]] | None = None
    """Mixtures of experts: the experts of the first tokens, [tokens][layers with experts][experts per token], as
    ``routing_indices`` of a result has them. Later tokens are routed as usual."""
    allowed_token_ids: list[int] | None = None
    """The only tokens that the answer may contain, with those that end it."""
    skip_special_tokens: bool = True
    """Leaves special tokens out of the generated text; the token that ended the answer is always left out, unless
    ``detokenize_stop_sequence`` keeps it."""
    return_tokens_as_token_ids: bool = False
    """The keys of ``generated_top_n_logprobs`` and ``prompt_top_n_logprobs`` are ``token_id:N`` instead of texts."""
    thinking_token_budget: Annotated[int | None, Range(0)] = None
    """Most tokens of the reasoning; ``thinking_end`` then ends it. None means no limit."""
    thinking_begin: str = ""
    """The text that begins the reasoning at the start of an answer; empty if the answer begins with reasoning."""
    thinking_end: str = "</think>"
    """The text that ends the reasoning."""
    cache_salt: str | None = None
    """Requests use only cached prefixes of requests with the same salt. A secret salt hides them from other users."""
    adapter: str | None = None
    """Name of the LoRA adapter that is applied to the model."""
    tenant: str | None = None
    """A full engine is shared equally between tenants; requests without one are of one tenant."""
    body: str | None = None
    """Name of the body that this request is an answer of, among those of the tenant. None: it is the only answer."""
    answers: Annotated[int, Range(1)] = 1
    """Number of answers of the body: a small body does not wait for a large one that arrived shortly before it."""
    pooling: str | None = None
    """The result has an ``embedding`` instead of an answer: the hidden state of the prompt's last token ("last"), or
    the mean over its tokens ("mean"). Needs ``num_tokens_to_generate=0``."""

    def __post_init__(self) -> None:
        self._join_stop_names(self.stop, self.stop_words)
        self._validate()

    @property
    def is_greedy(self) -> bool:
        """True if the most likely token is always sampled, without noise."""
        return self.temperature == 0 or self.top_k == 1

    def samples(self) -> list[SamplingParams]:
        """The parameters of each of the n answers. The i-th has the seed plus i, so that it can be reproduced
        separately."""
        if self.n == 1:
            return [self]
        alone = [copy.deepcopy(self) for _ in range(self.n)]
        for index, params in enumerate(alone):
            params.n = 1
            params.seed = None if self.seed is None else (self.seed + index) % SEEDS
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
        """All fields as plain values. The keys of ``logit_bias`` are text, for JSON and msgpack."""
        values = {name: getattr(self, name) for name in _SERIALIZED}
        if self.logit_bias is not None:
            values["logit_bias"] = {str(token): bias for token, bias in self.logit_bias.items()}
        return values

    def serialize_changed(self) -> dict[str, Any]:
        """The fields that are not at their defaults; an engine of an earlier version accepts them if it has them."""
        return {name: value for name, value in self.serialize().items() if value != DEFAULTS[name]}

    @classmethod
    def deserialize(cls, data: Mapping[str, Any]) -> SamplingParams:
        """The inverse of serialize; fields that are not in ``data`` have their defaults.

        Raises:
            InvalidRequestError: As in add_attributes.
        """
        _check_names(data)
        return cls(**data)

    def __deepcopy__(self, memo: dict[int, Any]) -> SamplingParams:
        """Copy the containers only, because their items are immutable."""
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        twin.stop = twin.stop_words = None if self.stop_words is None else [*self.stop_words]
        twin.bad_words = None if self.bad_words is None else [*self.bad_words]
        twin.stop_token_ids = None if self.stop_token_ids is None else [*self.stop_token_ids]
        twin.allowed_token_ids = None if self.allowed_token_ids is None else [*self.allowed_token_ids]
        twin.logit_bias = None if self.logit_bias is None else {**self.logit_bias}
        return twin

    def _join_stop_names(self, stop: Any, stop_words: Any) -> None:
        if stop and stop_words and _as_list(stop) != _as_list(stop_words):
            raise InvalidRequestError(f"stop={stop!r} and stop_words={stop_words!r} differ; give one", field="stop")
        self.stop = self.stop_words = _as_list(stop_words or stop)

    def _validate(self) -> None:
        values = self.__dict__
        for name, check in _CHECKS.items():
            if values[name] is not DEFAULTS[name]:
                check(name, values[name])
        for name, remedy in _UNAVAILABLE.items():
            if values[name]:
                raise InvalidRequestError(f"{name}=True: {remedy}", field=name)
        self._check_stops()
        self._check_bad_words()
        self._check_allowed_tokens()
        self.logit_bias = checked_biases(self.logit_bias)
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
        self._check_thinking()
        self._check_texts()
        self._check_pooling()
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
        # Only the end of the answer may follow the end of a grammar.
        for name in ("min_tokens", "ignore_eos", "bad_words", "allowed_token_ids"):
            if value := getattr(self, name):
                raise InvalidRequestError(f"{name}={value!r} is not possible together with a grammar", field=name)

    def _check_thinking(self) -> None:
        for name, shortest in (("thinking_begin", 0), ("thinking_end", 1)):
            value = getattr(self, name)
            if not isinstance(value, str) or not shortest <= len(value) <= LONGEST_MARKER:
                raise InvalidRequestError(
                    f"{name}={value!r} must be a text of {shortest} to {LONGEST_MARKER} characters", field=name
                )

    def _check_texts(self) -> None:
        for name, longest in _LONGEST_TEXTS.items():
            value = getattr(self, name)
            if value is not None and not (isinstance(value, str) and 0 < len(value) <= longest):
                raise InvalidRequestError(f"{name}={value!r} must be a text of 1 to {longest} characters", field=name)

    def _check_pooling(self) -> None:
        if self.pooling is None:
            return
        if self.pooling not in POOLINGS:
            raise InvalidRequestError(
                f"pooling={self.pooling!r} must be one of {', '.join(POOLINGS)}, or None", field="pooling"
            )
        if self.num_tokens_to_generate != 0:
            raise InvalidRequestError(
                f"pooling={self.pooling!r} generates no tokens; set num_tokens_to_generate=0", field="pooling"
            )

    def _check_stops(self) -> None:
        if any(not isinstance(text, str) or not text for text in self.stop_words or ()):
            raise InvalidRequestError(f"stop={self.stop!r} must be a list of non-empty texts", field="stop")
        check_ids("stop_token_ids", self.stop_token_ids)

    def _check_bad_words(self) -> None:
        words = self.bad_words
        if words is None:
            return
        if not isinstance(words, (list, tuple)) or any(not isinstance(word, str) or not word.strip() for word in words):
            raise InvalidRequestError(
                f"bad_words={words!r} must be a list of texts, none of them blank", field="bad_words"
            )
        if len(words) > _MOST_BAD_WORDS:
            raise InvalidRequestError(
                f"bad_words has {len(words)} texts; give at most {_MOST_BAD_WORDS}", field="bad_words"
            )
        if (size := sum(map(len, words))) > MOST_BAD_CHARACTERS:
            raise InvalidRequestError(
                f"bad_words has {size} characters; give at most {MOST_BAD_CHARACTERS}", field="bad_words"
            )
        self.bad_words = list(words) or None

    def _check_allowed_tokens(self) -> None:
        check_ids("allowed_token_ids", self.allowed_token_ids)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidRequestError(
                "allowed_token_ids=[] allows no token; list at least one, or leave it out", field="allowed_token_ids"
            )


_LONGEST_TEXTS = {"cache_salt": LONGEST_SALT, "adapter": LONGEST_NAME, "tenant": LONGEST_SALT, "body": LONGEST_SALT}
DEFAULTS = {field.name: field.default for field in fields(SamplingParams)}
"""The default of every parameter."""
RANGES = ranges_of(SamplingParams)
"""The range of every parameter that has one."""
_SERIALIZED = [name for name in DEFAULTS if name != "stop"]
_CHECKS = checks_of(SamplingParams)
"""The check of each parameter. Most requests have most parameters at their defaults, which need no check."""


def _check_names(attributes: Mapping[str, Any]) -> None:
    unknown = sorted(attributes.keys() - DEFAULTS.keys())
    if unknown:
        raise InvalidRequestError(f"{unknown[0]} is not a sampling parameter", field=unknown[0])


def _as_list(value: Any) -> list[str] | None:
    if isinstance(value, str):
        return [value]
    if value is not None and not isinstance(value, (list, tuple)):
        raise InvalidRequestError(f"stop={value!r} must be a text or a list of texts", field="stop")
    return list(value) if value else None
