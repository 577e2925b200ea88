"""From the fields of a request to the engine's sampling parameters."""

from __future__ import annotations

from megatron_runtime.errors import InvalidRequestError
from megatron_runtime.sampling_params import SamplingParams
from megatron_runtime.server.errors import ApiError
from megatron_runtime.server.protocol import ChatCompletionBody, CompletionBody

_SEEDS = 2**64


def sampling_params(
    body: ChatCompletionBody | CompletionBody, *, sample: int, limit: int, vocab_size: int
) -> SamplingParams:
    """The parameters of the ``sample``-th of ``n`` answers, which may have ``limit`` tokens.

    With a seed each sample gets its own, so that they differ from each other and repeat with the request.

    Raises:
        ApiError: 400, naming the field that the engine would refuse.
    """
    if body.min_tokens > limit:
        message = f"min_tokens: {body.min_tokens} tokens are more than the {limit} that the answer may have"
        raise ApiError(400, message, param="min_tokens")
    if isinstance(body, ChatCompletionBody):
        with_log_probs, top = body.logprobs, body.top_logprobs
    else:
        with_log_probs, top = body.logprobs is not None, body.logprobs or 0
    try:
        params = SamplingParams(
            temperature=body.temperature,
            top_k=max(body.top_k, 0),
            top_p=body.top_p,
            min_p=body.min_p,
            repetition_penalty=body.repetition_penalty,
            frequency_penalty=body.frequency_penalty,
            presence_penalty=body.presence_penalty,
            logit_bias=body.logit_bias,  # type: ignore[arg-type]
            min_tokens=body.min_tokens,
            seed=None if body.seed is None else (body.seed + sample) % _SEEDS,
            num_tokens_to_generate=limit,
            stop=body.stop_strings,
            stop_token_ids=body.stop_token_ids,
            ignore_eos=body.ignore_eos,
            return_log_probs=with_log_probs,
            skip_prompt_log_probs=True,
            top_n_logprobs=top,
            streaming=body.stream,
        )
    except InvalidRequestError as error:
        raise ApiError(400, str(error), param=error.field) from error
    for token in params.logit_bias or ():
        if token >= vocab_size:
            message = f"logit_bias: token {token} is outside the vocabulary of {vocab_size} tokens"
            raise ApiError(400, message, param="logit_bias")
    return params


def token_limit(prompt_tokens: int, wanted: int | None, longest: int, *, param: str, prompt_param: str) -> int:
    """How many tokens to generate; raises ApiError 400 when prompt and answer do not fit together."""
    left = longest - prompt_tokens
    if left < 1:
        message = (
            f"{prompt_param}: {prompt_tokens} tokens leave no room for an answer; prompt and answer together may have "
            f"{longest} tokens"
        )
        raise ApiError(400, message, param=prompt_param, code="context_length_exceeded")
    if wanted is not None and wanted > left:
        message = (
            f"{param}: {wanted} tokens after a prompt of {prompt_tokens} make {prompt_tokens + wanted}, but prompt and "
            f"answer together may have {longest}; ask for at most {left}"
        )
        raise ApiError(400, message, param=param, code="context_length_exceeded")
    return left if wanted is None else wanted
