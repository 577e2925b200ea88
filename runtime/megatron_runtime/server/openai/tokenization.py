"""``POST /tokenize``, ``POST /detokenize`` and ``GET /tokenizer_info``."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, Field, model_validator

from megatron_runtime.model.tokenizer import Tokenizer
from megatron_runtime.server.bodies.limits import TokenId
from megatron_runtime.server.bodies.only import Only
from megatron_runtime.server.bodies.protocol import ChatMessage
from megatron_runtime.server.bodies.sampling import check_tokens
from megatron_runtime.server.bodies.tools import Tool
from megatron_runtime.server.errors import ApiError, check_text
from megatron_runtime.server.messages.conversation import render
from megatron_runtime.server.messages.tool_parsers.tool_format import ToolFormat

MAX_CHARACTERS = 2**20
"""Of a text to tokenize, which takes a hundred bytes of memory for each."""


class TokenizeBody(BaseModel):
    """``POST /tokenize``: a prompt as in completions, or messages as in a chat."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool = True
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: Annotated[Any, Only(None)] = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    tools: list[Tool] = Field(default_factory=list)
    return_token_strs: bool = False
    media_io_kwargs: Annotated[Any, Only(None, {})] = None
    mm_processor_kwargs: Annotated[Any, Only(None, {})] = None

    @model_validator(mode="after")
    def _one_of_prompt_and_messages(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("set either prompt or messages")
        if self.continue_final_message:
            self.add_generation_prompt = False
        return self


class DetokenizeBody(BaseModel):
    """``POST /detokenize``."""

    model: str | None = None
    tokens: list[TokenId]


def tokenize(
    body: TokenizeBody, tokenizer: Tokenizer, longest: int, tool_format: ToolFormat | None = None
) -> dict[str, Any]:
    """The tokens, their count, and the maximum length of a prompt and its answer."""
    if body.messages is None:
        _check_characters(body.prompt or "")
        tokens = tokenizer.tokenize(body.prompt or "", add_special_tokens=body.add_special_tokens)
    else:
        tokens = render(
            body.messages,
            tokenizer,
            body.chat_template_kwargs,
            param="messages",
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            tools=[tool.function.for_template() for tool in body.tools] or None,
            tool_format=tool_format,
        )
    texts = None
    if body.return_token_strs:
        texts = [tokenizer.detokenize([token], skip_special_tokens=False) for token in tokens]
    return {
        "count": len(tokens),
        "max_model_len": longest,
        "tokens": tokens,
        "token_strs": texts,
    }


def _check_characters(text: str) -> None:
    check_text(text, param="prompt")
    if len(text) > MAX_CHARACTERS:
        message = f"prompt: has {len(text)} characters; send at most {MAX_CHARACTERS} in one request"
        raise ApiError(400, message, param="prompt")


def detokenize(body: DetokenizeBody, tokenizer: Tokenizer) -> dict[str, Any]:
    """The text, including special tokens."""
    check_tokens(body.tokens, tokenizer.vocab_size, param="tokens")
    return {"prompt": tokenizer.detokenize(body.tokens, skip_special_tokens=False)}


def tokenizer_info(tokenizer: Tokenizer, longest: int) -> dict[str, Any]:
    """Information for clients that build prompts themselves: the chat template and the special tokens by name."""
    template = tokenizer.chat_template(has_tools=False)
    return {
        "eos_token": tokenizer.detokenize([tokenizer.eod], skip_special_tokens=False),
        **tokenizer.special_token_names,
        "chat_template": None if template is None else template.source,
        "model_max_length": longest,
    }
