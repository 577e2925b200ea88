"""The body of ``POST /v1/responses`` as this server takes it: text in, text out, nothing kept."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from megatron_runtime.server.protocol import ChatMessage, ContentPart, GenerationBody, only


class InputPart(BaseModel):
    """One part of an item's content: the user's text, or that of an earlier answer."""

    type: Literal["input_text", "output_text"]
    text: str


class InputItem(BaseModel):
    """One message of the conversation so far; an item of an earlier answer's ``output`` is one too."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[InputPart]

    def message(self) -> ChatMessage:
        """The same as a message of a chat."""
        if isinstance(self.content, str):
            return ChatMessage(role=self.role, content=self.content)
        parts = [ContentPart(type="text", text=part.text) for part in self.content]
        return ChatMessage(role=self.role, content=parts)


class TextFormat(BaseModel):
    """What form the text of the answer has: that of a chat's ``response_format``, with the schema one level higher."""

    model_config = ConfigDict(serialize_by_alias=True)

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    definition: dict[str, Any] | None = Field(default=None, alias="schema")

    @model_validator(mode="after")
    def _a_schema_for_its_type(self) -> TextFormat:
        if (self.type == "json_schema") != (self.definition is not None):
            raise ValueError("schema goes together with type json_schema, and with no other")
        return self


class TextOptions(BaseModel):
    """What the text of the answer looks like."""

    format: TextFormat = Field(default_factory=lambda: TextFormat(type="text"))
    verbosity: Annotated[str | None, only(None, "medium")] = None


class ResponsesBody(GenerationBody):
    """``POST /v1/responses``. Since nothing is kept, a conversation is sent whole each time, as ``input``."""

    prompt_param = "input"

    input: str | Annotated[list[InputItem], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    top_logprobs: int = Field(0, ge=0, le=20)
    include: list[str] = Field(default_factory=list)
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    text: TextOptions = Field(default_factory=TextOptions)

    n: Annotated[int, only(1)] = 1
    previous_response_id: Annotated[Any, only(None)] = None
    conversation: Annotated[Any, only(None)] = None
    prompt: Annotated[Any, only(None)] = None
    background: Annotated[bool, only(False)] = False
    truncation: Annotated[str, only("disabled")] = "disabled"
    tools: Annotated[list[Any], only([])] = Field(default_factory=list)
    tool_choice: Annotated[Any, only("auto", "none")] = "auto"
    parallel_tool_calls: bool = True
    reasoning: Annotated[Any, only(None, {})] = None

    @property
    def messages(self) -> list[ChatMessage]:
        """The conversation, the instructions first."""
        opening = [] if self.instructions is None else [ChatMessage(role="system", content=self.instructions)]
        if isinstance(self.input, str):
            return [*opening, ChatMessage(role="user", content=self.input)]
        return [*opening, *(item.message() for item in self.input)]

    @property
    def token_limit(self) -> int | None:
        """``max_output_tokens``."""
        return self.max_output_tokens

    @property
    def format(self) -> tuple[str, dict[str, Any] | None]:
        """``text.format`` and its JSON schema, or None."""
        form = self.text.format
        return "text.format", {"type": "object"} if form.type == "json_object" else form.definition

    @property
    def limit_param(self) -> str:
        """The field that ``token_limit`` comes from."""
        return "max_output_tokens"

    @property
    def top_n_log_probs(self) -> int | None:
        """``top_logprobs``, which ``include`` may also ask for without any."""
        return self.top_logprobs if self.top_logprobs or "message.output_text.logprobs" in self.include else None
