"""From the messages of a chat to the tokens that the model goes on from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_runtime.model.tokenizer import Tokenizer
from megatron_runtime.server.bodies.protocol import ChatCompletionBody, ChatMessage
from megatron_runtime.server.bodies.sampling import check_tokens
from megatron_runtime.server.errors import ApiError
from megatron_runtime.server.messages.tool_prompt import with_tools_in_words

_OUR_VARIABLES = ("self", "messages", "tools", "add_generation_prompt")


def chat_prompt(body: ChatCompletionBody, tokenizer: Tokenizer) -> list[int]:
    """The tokens of the conversation up to where the assistant's answer begins.

    Raises:
        ApiError: 400 when the model's template does not take these messages, or a field is not what it should be.
    """
    tools = body.tool_use.for_template()
    tokens = render(body.messages, tokenizer, body.chat_template_kwargs, param=body.prompt_param, tools=tools)
    if not body.prevent_retokenization:
        return tokens
    last = max((at for at, message in enumerate(body.messages) if message.has_tokens), default=None)
    if last is None:
        return tokens
    known = _known_tokens(body.messages[last], tokenizer)
    # Whatever the template makes of earlier turns, it closes as many of them as when the answer is the last message.
    closed = render(
        body.messages[: last + 1],
        tokenizer,
        body.chat_template_kwargs,
        param=body.prompt_param,
        is_open=False,
        tools=tools,
    )
    rest = _after_ends(tokens, sum(token in tokenizer.eos_token_ids for token in closed), tokenizer)
    return tokens if rest is None else known + rest


def render(
    messages: list[ChatMessage],
    tokenizer: Tokenizer,
    template_kwargs: dict[str, Any],
    *,
    param: str,
    is_open: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> list[int]:
    """What the model's template makes of messages, with the beginning of an answer if it is to be ``is_open``.

    A template that takes no tools gets them in words.
    """
    taken = [name for name in template_kwargs if name in _OUR_VARIABLES]
    if taken:
        message = f"chat_template_kwargs: {taken[0]} is what the server itself gives the template; leave it out"
        raise ApiError(400, message, param="chat_template_kwargs")
    told = [message.for_template() for message in messages]
    template = tokenizer.chat_template(has_tools=bool(tools))
    if template is not None and not template.takes_tools:
        told, tools = with_tools_in_words(told, tools), None
    try:
        return tokenizer.apply_chat_template(told, tools=tools, add_generation_prompt=is_open, **template_kwargs)
    except Exception as error:
        # The template is the checkpoint's own program; what it raises is its word on these messages.
        text = str(error).removeprefix("messages: the model's chat template refuses them: ")
        raise ApiError(400, f"{param}: the model's chat template refuses them: {text}", param=param) from error


def _known_tokens(message: ChatMessage, tokenizer: Tokenizer) -> list[int]:
    """The tokens that an answer was, with its prompt, up to the token that ended it."""
    prompt, made = message.prompt_token_ids or [], message.generation_token_ids or []
    check_tokens([*prompt, *made], tokenizer.vocab_size, param="messages")
    ends = [at for at, token in enumerate(made) if token in tokenizer.eos_token_ids]
    return [*prompt, *made[: ends[-1] + 1]] if ends else [*prompt, *made, tokenizer.eod]


def _after_ends(tokens: list[int], count: int, tokenizer: Tokenizer) -> list[int] | None:
    """What follows the ``count``-th token that ends a turn; None if there is no such token."""
    ends = [at for at, token in enumerate(tokens) if token in tokenizer.eos_token_ids]
    return tokens[ends[count - 1] + 1 :] if 0 < count <= len(ends) else None
