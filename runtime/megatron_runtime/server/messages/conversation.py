"""Renders the messages of a chat as prompt tokens."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_runtime.model.tokenizer import Tokenizer
from megatron_runtime.server.bodies.protocol import ChatCompletionBody, ChatMessage
from megatron_runtime.server.bodies.sampling import check_characters, check_tokens
from megatron_runtime.server.errors import ApiError
from megatron_runtime.server.messages.tool_prompt import with_tools_as_text

_RESERVED_VARIABLES = ("self", "messages", "tools", "add_generation_prompt")


def chat_prompt(body: ChatCompletionBody, tokenizer: Tokenizer, longest: int) -> list[int]:
    """The tokens of the conversation up to the beginning of the assistant's answer.

    ``longest`` is the maximum length of prompt and answer in tokens.

    Raises:
        ApiError: 400 when the chat template rejects these messages, or a field is invalid.
    """
    return with_bos(_chat_tokens(body, tokenizer, longest), body.add_bos, tokenizer)


def with_bos(tokens: list[int], add_bos: bool | None, tokenizer: Tokenizer) -> list[int]:
    """The prompt with one beginning-of-text token or without any, as ``add_BOS`` says; None leaves it unchanged."""
    if add_bos is None or tokenizer.bos is None:
        return tokens
    first = next((at for at, token in enumerate(tokens) if token != tokenizer.bos), len(tokens))
    return [tokenizer.bos] * add_bos + tokens[first:]


def _chat_tokens(body: ChatCompletionBody, tokenizer: Tokenizer, longest: int) -> list[int]:
    tools = body.tool_use.for_template()
    tokens = render(
        body.messages, tokenizer, body.chat_template_kwargs, param=body.prompt_param, tools=tools, longest=longest
    )
    if not body.prevent_retokenization:
        return tokens
    last = max((at for at, message in enumerate(body.messages) if message.has_tokens), default=None)
    if last is None:
        return tokens
    known = _known_tokens(body.messages[last], tokenizer)
    # The template may render earlier turns differently, but the number of end-of-turn tokens up to this answer is the
    # same.
    closed = render(
        body.messages[: last + 1],
        tokenizer,
        body.chat_template_kwargs,
        param=body.prompt_param,
        add_generation_prompt=False,
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
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    longest: int | None = None,
) -> list[int]:
    """The tokens of the messages in the model's chat template.

    ``add_generation_prompt`` appends the beginning of an answer. With ``continue_final_message`` the prompt ends with
    the content of the last message. If the template does not support tools, they are described in the system message.
    A text that can't fit into ``longest`` tokens is refused.
    """
    reserved = [name for name in template_kwargs if name in _RESERVED_VARIABLES]
    if reserved:
        message = f"chat_template_kwargs: {reserved[0]} is reserved for the server; leave it out"
        raise ApiError(400, message, param="chat_template_kwargs")
    rendered = [message.for_template() for message in messages]
    mark = secrets.token_hex(16) if continue_final_message else ""
    if mark:
        rendered[-1] = {**rendered[-1], "content": f"{rendered[-1]['content']}{mark}"}
    template = tokenizer.chat_template(has_tools=bool(tools))
    if template is not None and not template.takes_tools:
        rendered, tools = with_tools_as_text(rendered, tools), None
    try:
        prompt = tokenizer.render_chat(
            rendered, tools=tools, add_generation_prompt=add_generation_prompt, **template_kwargs
        )
    except Exception as error:
        # The template is code of the checkpoint and may raise any exception to reject messages.
        text = str(error).removeprefix("messages: the model's chat template refuses them: ")
        raise ApiError(400, f"{param}: the model's chat template refuses them: {text}", param=param) from error
    prompt = _up_to(mark, prompt, param) if mark else prompt
    check_characters(prompt, tokenizer, longest, param=param)
    return tokenizer.tokenize(prompt)


def _up_to(mark: str, prompt: str, param: str) -> str:
    """The prompt up to the end of the last message's content, which ends with ``mark``."""
    start, found, _ = prompt.rpartition(mark)
    if not found:
        message = f"{param}: the chat template does not show the last message, so it can't be continued"
        raise ApiError(400, message, param=param)
    return start


def _known_tokens(message: ChatMessage, tokenizer: Tokenizer) -> list[int]:
    """The prompt and the tokens of an earlier answer, up to the token that ended it."""
    prompt, made = message.prompt_token_ids or [], message.generation_token_ids or []
    check_tokens([*prompt, *made], tokenizer.vocab_size, param="messages")
    ends = [at for at, token in enumerate(made) if token in tokenizer.eos_token_ids]
    return [*prompt, *made[: ends[-1] + 1]] if ends else [*prompt, *made, tokenizer.eod]


def _after_ends(tokens: list[int], count: int, tokenizer: Tokenizer) -> list[int] | None:
    """The tokens after the ``count``-th end-of-turn token; None if there are fewer."""
    ends = [at for at, token in enumerate(tokens) if token in tokenizer.eos_token_ids]
    return tokens[ends[count - 1] + 1 :] if 0 < count <= len(ends) else None
