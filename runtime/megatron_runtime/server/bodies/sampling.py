"""From the fields of a request to the sampling parameters of its answers."""

from __future__ import annotations

from collections.abc import Collection

from megatron_runtime.errors import InvalidRequestError
from megatron_runtime.model.tokenizer import Tokenizer
from megatron_runtime.sampling_params import SEEDS, SamplingParams
from megatron_runtime.server.bodies.limits import MAX_CHOICES, MAX_COPIED_TOKENS
from megatron_runtime.server.bodies.protocol import GenerationBody
from megatron_runtime.server.errors import CONTEXT_EXCEEDED, ApiError, check_text, context_length

MAX_TRUNCATED_CHARACTERS = 2**20
"""Of a prompt with ``truncate_prompt_tokens``, which is tokenized as a whole."""


def check_choices(body: GenerationBody, prompts: int) -> None:
    """Raises ApiError 400 if the prompts times ``n`` are too many; before the prompts are tokenized, it saves that."""
    if prompts * body.n > MAX_CHOICES:
        message = f"n: {prompts} prompts times {body.n} exceed the limit of {MAX_CHOICES} answers; reduce n"
        raise ApiError(400, message, param="n")


def check_copies(body: GenerationBody, choices: int) -> None:
    """Raises ApiError 400 if the choices have too many tokens: the engine applies them to each choice at each token."""
    for field, tokens in (("allowed_token_ids", body.allowed_token_ids), ("logit_bias", body.logit_bias)):
        if tokens and choices * len(tokens) > MAX_COPIED_TOKENS:
            message = (
                f"{field}: {len(tokens)} tokens for each of {choices} choices exceed {MAX_COPIED_TOKENS} together; "
                "list fewer tokens, or reduce n"
            )
            raise ApiError(400, message, param=field)


def sampling_params(body: GenerationBody, *, limit: int, vocab_size: int, grammar: str | None = None) -> SamplingParams:
    """The parameters of all answers with at most ``limit`` tokens that match ``grammar``, without their seeds.

    Raises:
        ApiError: 400 that names the invalid field.
    """
    if body.min_tokens > limit:
        message = f"min_tokens: {body.min_tokens} is more than the limit of {limit} tokens for this answer; reduce it"
        raise ApiError(400, message, param="min_tokens")
    top = body.scored_tokens
    try:
        params = SamplingParams(
            **body.passed_on()
            | {
                "top_k": min(max(body.top_k, 0), vocab_size),
                "grammar": grammar,
                "num_tokens_to_generate": limit,
                "stop": body.stop_strings,
                "return_log_probs": top is not None,
                "skip_prompt_log_probs": not body.scores_prompt,
                "top_n_logprobs": top or 0,
                "return_tokens_as_token_ids": bool(top),  # Texts are ambiguous.
                "detokenize_stop_sequence": body.include_stop_str_in_output,
                "streaming": body.stream,
                "streaming_interval": min(body.streaming_interval, max(limit, 1)),
            }
        )
    except InvalidRequestError as error:
        raise ApiError(400, str(error), param=error.field) from error
    check_tokens(params.logit_bias or (), vocab_size, param="logit_bias")
    check_tokens(params.stop_token_ids or (), vocab_size, param="stop_token_ids")
    check_tokens(params.allowed_token_ids or (), vocab_size, param="allowed_token_ids")
    return params


def sample_seed(body: GenerationBody, sample: int) -> int | None:
    """The seed of answer number ``sample`` of ``n``; samples differ, but are reproducible."""
    return None if body.seed is None else (body.seed + sample) % SEEDS


def check_tokens(tokens: Collection[int], vocab_size: int, *, param: str) -> None:
    """Raises ApiError 400 that names the first token outside the vocabulary."""
    if max(tokens, default=0) >= vocab_size:
        first = next(token for token in tokens if token >= vocab_size)
        message = f"{param}: token {first} is outside the vocabulary of {vocab_size} tokens"
        raise ApiError(400, message, param=param)


def check_characters(text: str, tokenizer: Tokenizer, longest: int | None, *, param: str) -> None:
    """Raises ApiError 400 before the work of tokenization if ``text`` can't fit into ``longest`` tokens.

    Raises the same for a lone surrogate, which JSON can express but UTF-8 can't.
    """
    check_text(text, param=param)
    if longest is not None and tokenizer.longest_token is not None and len(text) > longest * tokenizer.longest_token:
        message = f"{param}: {len(text)} characters can't fit. {context_length(longest)} {CONTEXT_EXCEEDED}"
        raise ApiError(400, message, param=param, code="context_length_exceeded")


def truncated(tokens: list[int], body: GenerationBody, longest: int) -> list[int]:
    """The end of a prompt, as many tokens as ``truncate_prompt_tokens`` says; -1 means as many as fit.

    Raises:
        ApiError: As for `check_truncation`.
    """
    count = body.truncate_prompt_tokens
    if count is None:
        return tokens
    check_truncation(count, longest)
    if count == -1:
        count = max(longest - max(body.token_limit or 1, 1), 1)
    return tokens[len(tokens) - count :] if count < len(tokens) else tokens


def check_truncation(count: int, longest: int) -> None:
    """Raises ApiError 400 if ``truncate_prompt_tokens`` keeps no token, or more than ``longest``."""
    if count == 0:
        message = "truncate_prompt_tokens: 0 leaves no prompt; keep at least 1 token, or -1 for as many as fit"
        raise ApiError(400, message, param="truncate_prompt_tokens")
    if count > longest:
        message = (
            f"truncate_prompt_tokens: {count} is more than the {longest} tokens that prompt and answer together may "
            "have; reduce it"
        )
        raise ApiError(400, message, param="truncate_prompt_tokens")


def check_truncatable(text: str, *, param: str) -> None:
    """Raises ApiError 400 for a text that takes too long to tokenize for its last tokens, and for lone surrogates."""
    check_text(text, param=param)
    if len(text) > MAX_TRUNCATED_CHARACTERS:
        message = f"{param}: {len(text)} characters are too many to truncate; send at most {MAX_TRUNCATED_CHARACTERS}"
        raise ApiError(400, message, param=param)


def token_limit(
    prompt_tokens: int,
    wanted: int | None,
    longest: int,
    *,
    param: str,
    prompt_param: str,
    is_clamped: bool = False,
) -> int:
    """The number of tokens to generate; raises ApiError 400 when prompt and answer exceed ``longest`` tokens.

    With ``is_clamped`` a limit that is too large is reduced instead, as by Megatron's engine.
    """
    left = longest - prompt_tokens
    if left < 1:
        message = (
            f"{prompt_param}: {prompt_tokens} tokens leave no room for an answer. {context_length(longest)} "
            f"{CONTEXT_EXCEEDED}"
        )
        raise ApiError(400, message, param=prompt_param, code="context_length_exceeded")
    if is_clamped and wanted is not None:
        return min(wanted, left)
    if wanted is not None and wanted > left:
        message = (
            f"{param}: {wanted} tokens after a prompt of {prompt_tokens} make {prompt_tokens + wanted}; request at "
            f"most {left}. {context_length(longest)}"
        )
        raise ApiError(400, message, param=param, code="context_length_exceeded")
    return left if wanted is None else wanted
