"""Bodies of the OpenAI endpoints as this server takes them.

Fields of OpenAI's API that the engine does not implement are listed too, so that a client that sends one learns that
it would be without effect; only a neutral value passes. Unknown fields are refused, since most of them are slips.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

MAX_CHOICES = 128
"""Most choices (prompts x n) that one request may ask for."""


def _only(*neutral: object) -> AfterValidator:
    """Accepts the neutral values of a field that this server does not implement."""

    def check(value: Any) -> Any:
        if value not in neutral:
            raise ValueError("is not supported by this server; leave it out")
        return value

    return AfterValidator(check)


StopString = Annotated[str, Field(min_length=1)]
TokenId = Annotated[int, Field(ge=0)]


class StreamOptions(BaseModel):
    """What a stream carries besides its deltas."""

    model_config = ConfigDict(extra="forbid")

    include_usage: bool = False
    include_obfuscation: Annotated[bool, _only(False)] = False


class GenerationBody(BaseModel):
    """Fields that chat and text completions share."""

    model_config = ConfigDict(extra="forbid")

    model: str
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1)
    min_p: float = Field(0.0, ge=0, le=1)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, ge=0.01, le=100)
    logit_bias: dict[str, float] = Field(default_factory=dict)
    min_tokens: int = Field(0, ge=0)
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    seed: int | None = None
    stop: StopString | list[StopString] = Field(default_factory=list)
    stop_token_ids: list[TokenId] = Field(default_factory=list)
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None

    # Known to OpenAI's clients and without influence on the answer.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _null_means_absent(cls, body: Any) -> Any:
        """OpenAI's clients may send null for a field that they leave at its default."""
        return {key: value for key, value in body.items() if value is not None} if isinstance(body, dict) else body

    @model_validator(mode="after")
    def _stream_options_belong_to_a_stream(self) -> GenerationBody:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only allowed together with stream: true")
        return self

    @property
    def stop_strings(self) -> list[str]:
        """The stop strings as a list."""
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk that carries the usage."""
        return self.stream_options is not None and self.stream_options.include_usage


class ContentPart(BaseModel):
    """One part of a message; text is the only kind that the served models read."""

    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """One message. Further fields are handed to the chat template as they are."""

    model_config = ConfigDict(extra="allow")

    role: str = Field(min_length=1)
    content: str | list[ContentPart] | None = None

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates expect it: content is one string."""
        message = self.model_dump(exclude_none=True)
        if isinstance(self.content, list):
            message["content"] = "".join(part.text for part in self.content)
        message.setdefault("content", "")
        return message


class ChatCompletionBody(GenerationBody):
    """``POST /v1/chat/completions``."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    tools: Annotated[list[Any] | None, _only(None, [])] = None
    tool_choice: Annotated[Any, _only(None, "none", "auto")] = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[list[Any] | None, _only(None, [])] = None
    function_call: Annotated[Any, _only(None, "none", "auto")] = None
    response_format: Annotated[Any, _only(None, {"type": "text"})] = None
    modalities: Annotated[list[str] | None, _only(None, ["text"])] = None
    reasoning_effort: Annotated[str | None, _only(None, "none")] = None

    @model_validator(mode="after")
    def _top_logprobs_needs_logprobs(self) -> ChatCompletionBody:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs is only allowed together with logprobs: true")
        return self

    @property
    def token_limit(self) -> int | None:
        """Most tokens to generate; None means as many as fit."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens


class CompletionBody(GenerationBody):
    """``POST /v1/completions``."""

    prompt: str | list[TokenId] | list[str] | list[list[TokenId]]
    max_tokens: int = Field(16, ge=1)
    logprobs: int | None = Field(None, ge=0, le=20)

    best_of: Annotated[int, _only(1)] = 1
    echo: Annotated[bool, _only(False)] = False
    suffix: Annotated[str | None, _only(None, "")] = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts one by one. A flat list of numbers is one tokenized prompt."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [[token for token in self.prompt if isinstance(token, int)]]
        return [prompt for prompt in self.prompt if not isinstance(prompt, int)]
