"""The body of ``POST /v1/responses``: text and tool calls, stateless."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

from megatron_runtime.server.bodies.effort import Effort, Verbosity, effort_variables
from megatron_runtime.server.bodies.limits import MAX_MESSAGES, MAX_PARTS, MAX_TOOLS, FirstError, Schema, at_most
from megatron_runtime.server.bodies.only import Only
from megatron_runtime.server.bodies.protocol import ChatMessage, ContentPart, GenerationBody
from megatron_runtime.server.bodies.tools import (
    CHOICE_KIND,
    CalledFunction,
    FunctionDefinition,
    ToolCall,
    ToolChoice,
    ToolType,
    ToolUse,
    TypedTool,
    tool_use,
)


class InputPart(BaseModel):
    """One part of an item's content: text of the user or of an earlier answer."""

    type: Literal["input_text", "output_text"]
    text: str


InputParts = Annotated[list[InputPart], Field(max_length=MAX_PARTS), FirstError()]


class InputItem(BaseModel):
    """One message of the conversation, or a message item of an earlier answer's ``output``."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | InputParts

    def message(self) -> ChatMessage:
        """The same as a message of a chat."""
        return ChatMessage(role=self.role, content=_content(self.content))


class CallItem(CalledFunction):
    """A tool call of an earlier answer."""

    type: Literal["function_call"]
    call_id: str

    def call(self) -> ToolCall:
        """The same as a call in a chat's message."""
        return ToolCall(id=self.call_id, function=CalledFunction(name=self.name, arguments=self.arguments))


class ResultItem(BaseModel):
    """The result of a tool call."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | InputParts

    def message(self) -> ChatMessage:
        """The same as a message of a chat."""
        return ChatMessage.model_validate(
            {"role": "tool", "tool_call_id": self.call_id, "content": _content(self.output)}
        )


class ReasoningPart(BaseModel):
    """A part of the model's reasoning."""

    type: Literal["reasoning_text"]
    text: str


class ReasoningInputItem(BaseModel):
    """The reasoning of an earlier answer."""

    type: Literal["reasoning"]
    content: Annotated[list[ReasoningPart], Field(max_length=MAX_PARTS), FirstError()] | None = None

    def text(self) -> str:
        """The text of all parts."""
        return "".join(part.text for part in self.content or [])


def _kind_of_item(item: Any) -> str | None:
    kind = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", None)
    return _ITEM_KINDS.get(kind) if isinstance(kind, str) else None


_ITEM_KINDS = {
    "message": "Message",
    "function_call": "Call",
    "function_call_output": "Result",
    "reasoning": "Reasoning",
}
AnyItem = Annotated[
    Annotated[InputItem, Tag("Message")]
    | Annotated[CallItem, Tag("Call")]
    | Annotated[ResultItem, Tag("Result")]
    | Annotated[ReasoningInputItem, Tag("Reasoning")],
    Discriminator(
        _kind_of_item,
        custom_error_type="item_type",
        custom_error_message=f"the type of an item must be one of {', '.join(_ITEM_KINDS)}",
    ),
]


class ResponseTool(FunctionDefinition, TypedTool):
    """A function tool; its fields are at the top level, not in ``function`` as in chats."""


class NamedResponseTool(BaseModel):
    """The function that the model must call."""

    type: ToolType
    name: str


class AllowedResponseTools(BaseModel):
    """Limits the calls to some of the tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedResponseTool], Field(min_length=1, max_length=MAX_TOOLS), FirstError()]

    @property
    def names(self) -> list[str]:
        """The names of the functions."""
        return [tool.name for tool in self.tools]


class ReasoningOptions(BaseModel):
    """The reasoning before the answer; it is always complete, so there are no summaries."""

    effort: Effort | None = None
    summary: Annotated[str | None, Only(None, "auto")] = None
    generate_summary: Annotated[str | None, Only(None, "auto")] = None


AnyResponseToolChoice = Annotated[
    Annotated[ToolChoice, Tag("Word")]
    | Annotated[NamedResponseTool, Tag("Named")]
    | Annotated[AllowedResponseTools, Tag("Allowed")],
    CHOICE_KIND,
]


class TextFormat(BaseModel):
    """The format of the answer's text: a chat's ``response_format`` with the schema one level higher."""

    model_config = ConfigDict(serialize_by_alias=True)

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    definition: Schema | None = Field(default=None, alias="schema")

    @model_validator(mode="after")
    def _a_schema_for_its_type(self) -> TextFormat:
        if (self.type == "json_schema") != (self.definition is not None):
            raise ValueError("schema must be set for type json_schema, and for no other type")
        return self


class TextOptions(BaseModel):
    """Options for the text of the answer."""

    format: TextFormat = Field(default_factory=lambda: TextFormat(type="text"))
    verbosity: Verbosity | None = None


class ResponsesBody(GenerationBody):
    """``POST /v1/responses``. The API is stateless: ``input`` is the whole conversation."""

    prompt_param = "input"

    input: Annotated[
        str | Annotated[list[AnyItem], Field(min_length=1, max_length=MAX_MESSAGES), FirstError()],
        at_most(MAX_MESSAGES),
    ]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    top_logprobs: int = Field(0, ge=0, le=20)
    include: Annotated[list[str], Field(max_length=MAX_PARTS), FirstError()] = Field(default_factory=list)
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    text: TextOptions = Field(default_factory=TextOptions)
    tools: Annotated[list[ResponseTool], Field(max_length=MAX_TOOLS), FirstError()] = Field(default_factory=list)
    tool_choice: AnyResponseToolChoice = "auto"
    reasoning: ReasoningOptions = Field(default_factory=ReasoningOptions)
    parallel_tool_calls: bool = True
    include_reasoning: Annotated[bool, Only(True)] = True
    # The limit is for tools that run on OpenAI's servers, which this server does not have.
    max_tool_calls: int | None = Field(None, ge=1)

    n: Annotated[int, Only(1)] = 1
    prompt_logprobs: Annotated[int | None, Only(None)] = None
    enable_response_messages: Annotated[bool, Only(False)] = False
    previous_input_messages: Annotated[Any, Only(None)] = None
    previous_response_id: Annotated[Any, Only(None)] = None
    conversation: Annotated[Any, Only(None)] = None
    prompt: Annotated[Any, Only(None)] = None
    background: Annotated[bool, Only(False)] = False
    truncation: Annotated[str, Only("disabled")] = "disabled"

    @cached_property
    def tool_use(self) -> ToolUse:
        """The combination of ``tools``, ``tool_choice`` and ``parallel_tool_calls``."""
        choice, parallel = self.tool_choice, self.parallel_tool_calls
        match choice:
            case NamedResponseTool():
                return tool_use(self.tools, None, named=choice.name, is_parallel=parallel)
            case AllowedResponseTools():
                return tool_use(self.tools, choice.mode, named=None, allowed=choice.names, is_parallel=parallel)
        return tool_use(self.tools, choice, named=None, is_parallel=parallel)

    @property
    def template_variables(self) -> dict[str, Any]:
        """What the chat template gets beside messages and tools; ``chat_template_kwargs`` override other fields."""
        return {**effort_variables(self.reasoning.effort, self.text.verbosity), **self.chat_template_kwargs}

    @property
    def messages(self) -> list[ChatMessage]:
        """The conversation, the instructions first."""
        opening = [] if self.instructions is None else [ChatMessage(role="system", content=self.instructions)]
        if isinstance(self.input, str):
            return [*opening, ChatMessage(role="user", content=self.input)]
        return [*opening, *_conversation(self.input)]

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
        """``top_logprobs``; 0 if only ``include`` requests log probabilities."""
        return self.top_logprobs if self.top_logprobs or "message.output_text.logprobs" in self.include else None


def _content(content: str | list[InputPart]) -> str | list[ContentPart]:
    return content if isinstance(content, str) else [ContentPart(type="text", text=part.text) for part in content]


def _conversation(items: Iterable[InputItem | CallItem | ResultItem | ReasoningInputItem]) -> list[ChatMessage]:
    """Chat messages; consecutive reasoning, text and call items become one message of the assistant."""
    messages: list[ChatMessage] = []
    turn: ChatMessage | None = None
    for item in items:
        match item:
            case InputItem(role="assistant"):
                message = item.message()
                if turn is not None and turn.content is None and not turn.tool_calls:
                    turn.content = message.content
                    continue
                turn = message
            case CallItem() | ReasoningInputItem() if turn is not None:
                _add_to(turn, item)
                continue
            case CallItem() | ReasoningInputItem():
                turn = ChatMessage(role="assistant")
                _add_to(turn, item)
            case InputItem() | ResultItem():
                turn = None
                messages.append(item.message())
                continue
        messages.append(turn)
    return messages


def _add_to(turn: ChatMessage, item: CallItem | ReasoningInputItem) -> None:
    if isinstance(item, CallItem):
        turn.tool_calls = [*(turn.tool_calls or []), item.call()]
    else:
        assert turn.model_extra is not None
        turn.model_extra["reasoning_content"] = item.text()
