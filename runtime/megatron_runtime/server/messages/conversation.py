"""Renders the messages of a chat as prompt tokens."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from megatron_runtime.model.tokenizer import Tokenizer
from megatron_runtime.model.tokenizer.chat_template import ChatTemplate
from megatron_runtime.server.bodies.protocol import ChatCompletionBody, ChatMessage
from megatron_runtime.server.bodies.sampling import check_characters, check_tokens, check_truncatable, truncated
from megatron_runtime.server.errors import ApiError
from megatron_runtime.server.messages.tool_parsers.formats import HERMES, format_of_template
from megatron_runtime.server.messages.tool_parsers.tool_format import ToolFormat
from megatron_runtime.server.messages.tool_prompt import for_template

_RESERVED_VARIABLES = ("self", "messages", "tools", "add_generation_prompt", "chat_template", "continue_final_message")


def chat_prompt(
    body: ChatCompletionBody,
    tokenizer: Tokenizer,
    longest: int,
    tool_format: ToolFormat | None = None,
    *,
    trusts_templates: bool = False,
) -> list[int]:
    """The tokens of the conversation up to the beginning of the assistant's answer.

    ``longest`` is the maximum length of prompt and answer in tokens. ``tool_format`` describes the tools for templates
    that do not. ``trusts_templates`` permits the chat template of a request, which is a program without limits of time
    and memory.

    Raises:
        ApiError: 400 when the chat template rejects these messages, or a field is invalid.
    """
    if body.chat_template is not None and not trusts_templates:
        message = (
            "chat_template: the server uses only the model's template; leave this field out, or start the server with "
            "--trust-request-chat-template"
        )
        raise ApiError(400, message, param="chat_template")
    tokens = with_bos(_chat_tokens(body, tokenizer, longest, tool_format), body.add_bos, tokenizer)
    return truncated(tokens, body, longest)


def with_bos(tokens: list[int], add_bos: bool | None, tokenizer: Tokenizer) -> list[int]:
    """The prompt with one beginning-of-text token or without any, as ``add_BOS`` says; None leaves it unchanged."""
    if add_bos is None or tokenizer.bos is None:
        return tokens
    first = next((at for at, token in enumerate(tokens) if token != tokenizer.bos), len(tokens))
    return [tokenizer.bos] * add_bos + tokens[first:]


def _chat_tokens(
    body: ChatCompletionBody, tokenizer: Tokenizer, longest: int, tool_format: ToolFormat | None
) -> list[int]:
    render_these = partial(
        render,
        tokenizer=tokenizer,
        template_kwargs=body.template_variables,
        param=body.prompt_param,
        tools=body.tool_use.for_template(),
        template=None if body.chat_template is None else tokenizer.new_chat_template(body.chat_template),
        add_special_tokens=bool(body.add_special_tokens),
        tool_format=tool_format,
    )
    _check_documents(body, tokenizer)
    tokens = render_these(
        body.messages,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        longest=longest,
        is_truncated=body.truncate_prompt_tokens is not None,
    )
    if not body.prevent_retokenization:
        return tokens
    last = max((at for at, message in enumerate(body.messages) if message.has_tokens), default=None)
    if last is None:
        return tokens
    known = _known_tokens(body.messages[last], tokenizer)
    # The template may render earlier turns differently, but the number of end-of-turn tokens up to this answer is the
    # same.
    closed = render_these(body.messages[: last + 1], add_generation_prompt=False)
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
    template: ChatTemplate | None = None,
    add_special_tokens: bool = False,
    longest: int | None = None,
    is_truncated: bool = False,
    tool_format: ToolFormat | None = None,
) -> list[int]:
    """The tokens of the messages in the model's chat template.

    If the template does not support tools, they are described in the system message.

    Args:
        messages: The conversation.
        tokenizer: The model's.
        template_kwargs: Further variables of the template.
        param: The field of the messages, for errors.
        add_generation_prompt: Appends the beginning of an answer.
        continue_final_message: The prompt ends with the content of the last message.
        tools: As templates expect them.
        template: Instead of the model's.
        add_special_tokens: Adds the special tokens of a document; most templates have them already.
        longest: A text that can't fit into this number of tokens is refused.
        is_truncated: The prompt will be cut, so that its text may be longer than ``longest`` tokens.
        tool_format: Describes the tools for a template that does not; None for the format of the template.

    Raises:
        ApiError: 400 when the template rejects the messages, or a field is invalid.
    """
    _check_variables(template_kwargs)
    mark = secrets.token_hex(16) if continue_final_message else ""
    shown = [message.for_template() for message in messages]
    if mark:
        shown[-1] = {**shown[-1], "content": f"{shown[-1]['content']}{mark}"}
    variables = {**template_kwargs, "add_generation_prompt": add_generation_prompt}
    prompt = _text(shown, tokenizer, template, tools, tool_format, variables, param)
    prompt = _up_to(mark, prompt, param) if mark else prompt
    if is_truncated:
        check_truncatable(prompt, param=param)
    else:
        check_characters(prompt, tokenizer, longest, param=param)
    return tokenizer.tokenize(prompt, add_special_tokens=add_special_tokens)


def _check_variables(template_kwargs: Mapping[str, Any]) -> None:
    reserved = [name for name in template_kwargs if name in _RESERVED_VARIABLES]
    if reserved:
        message = f"chat_template_kwargs: {reserved[0]} is reserved for the server; leave it out"
        raise ApiError(400, message, param="chat_template_kwargs")


def _text(
    messages: list[dict[str, Any]],
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    tools: Sequence[Mapping[str, Any]] | None,
    tool_format: ToolFormat | None,
    variables: Mapping[str, Any],
    param: str,
) -> str:
    """The text of the messages in ``template``, or in that of the model."""
    known = template or tokenizer.chat_template(has_tools=bool(tools))
    if known is not None:
        form = tool_format or format_of_template(known.source) or HERMES
        messages, tools = for_template(messages, tools, known, form)
    try:
        if template is not None:
            return template.render(messages, tools=tools, **variables)
        return tokenizer.render_chat(messages, tools=tools, **variables)
    except Exception as error:
        # The template is code of the checkpoint and may raise any exception to reject messages.
        text = str(error).removeprefix("messages: the model's chat template refuses them: ")
        refusing = "model's" if template is None else "request's"
        raise ApiError(400, f"{param}: the {refusing} chat template refuses them: {text}", param=param) from error


def _up_to(mark: str, prompt: str, param: str) -> str:
    """The prompt up to the end of the last message's content, which ends with ``mark``."""
    start, found, _ = prompt.rpartition(mark)
    if not found:
        message = f"{param}: the chat template does not show the last message, so it can't be continued"
        raise ApiError(400, message, param="continue_final_message")
    return start


def _check_documents(body: ChatCompletionBody, tokenizer: Tokenizer) -> None:
    template = tokenizer.chat_template(has_tools=bool(body.tools))
    if body.documents and body.chat_template is None and template is not None and not template.takes("documents"):
        message = "documents: the model's chat template does not show documents; put them into a message"
        raise ApiError(400, message, param="documents")


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
