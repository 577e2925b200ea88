"""The bodies of ``POST /v1/messages`` and ``/v1/messages/count_tokens``, Anthropic's Messages API."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from megatron_runtime.server.bodies.content_blocks import MessageParam, TextBlock, TextBlocks, text_of
from megatron_runtime.server.bodies.limits import MAX_MESSAGES, MAX_TOOLS, FirstError, Schema, Stop, at_most
from megatron_runtime.server.bodies.only import Only
from megatron_runtime.server.bodies.protocol import ChatMessage, GenerationBody
from megatron_runtime.server.bodies.tools import LONGEST_NAME, FunctionDefinition, ToolChoice, ToolUse, tool_use


class ClientTool(BaseModel):
    """A tool that the client runs. Tools that run on Anthropic's servers are not supported."""

    type: Literal["custom"] | None = None
    name: str = Field(min_length=1, max_length=LONGEST_NAME)
    description: str | None = None
    input_schema: Schema
    strict: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _only_custom(cls, tool: Any) -> Any:
        if isinstance(tool, dict) and (kind := tool.get("type") or "custom") != "custom":
            message = f"type {kind!r} is not supported; tools are of type 'custom', with an input_schema"
            raise ValueError(message)
        return tool

    def function(self) -> FunctionDefinition:
        """The same as a function of a chat."""
        return FunctionDefinition(
            name=self.name, description=self.description, parameters=self.input_schema, strict=self.strict
        )


class ToolChoiceParam(BaseModel):
    """Which tool the answer may or must call."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _a_name_for_its_type(self) -> ToolChoiceParam:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("name must be set for type tool, and for no other type")
        return self


class Thinking(BaseModel):
    """Whether the model thinks before it answers."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=1)
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(BaseModel):
    """A JSON schema that the text of the answer matches."""

    model_config = ConfigDict(serialize_by_alias=True)

    type: Literal["json_schema"]
    definition: Schema = Field(alias="schema")


class OutputConfig(BaseModel):
    """The effort of an answer, which chat templates get as ``reasoning_effort``, and its format."""

    effort: str | None = None
    format: OutputFormat | None = None


Messages = Annotated[
    list[MessageParam], Field(min_length=1, max_length=MAX_MESSAGES), FirstError(), at_most(MAX_MESSAGES)
]


class _Conversation(BaseModel):
    """The fields that determine the prompt."""

    messages: Messages
    system: str | TextBlocks | None = None
    tools: Annotated[list[ClientTool], Field(max_length=MAX_TOOLS), FirstError()] = Field(default_factory=list)
    tool_choice: ToolChoiceParam | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    @property
    def chat_messages(self) -> list[ChatMessage]:
        """The conversation as messages of a chat, the system prompt first."""
        opening = [] if not self.system else [ChatMessage(role="system", content=text_of(self.system))]
        return [*opening, *(message for turn in self.messages for message in turn.messages())]

    @property
    def continues_answer(self) -> bool:
        """Whether the answer continues the text of the last turn, which is the assistant's."""
        last = self.messages[-1]
        if last.role != "assistant" or isinstance(last.content, str):
            return last.role == "assistant"
        return bool(last.content) and isinstance(last.content[-1], TextBlock)

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """The variables of the chat template: ``thinking`` under the name that Qwen3 and others use."""
        chosen: dict[str, Any] = {}
        if self.thinking is not None:
            chosen["enable_thinking"] = self.thinking.type != "disabled"
        if self.output_config is not None and self.output_config.effort is not None:
            chosen["reasoning_effort"] = self.output_config.effort
        return chosen | self.chat_template_kwargs

    @cached_property
    def tool_use(self) -> ToolUse:
        """The combination of ``tools`` and ``tool_choice``."""
        choice = self.tool_choice or ToolChoiceParam(type="auto")
        wanted: dict[str, ToolChoice] = {"auto": "auto", "any": "required", "none": "none"}
        return tool_use(
            [tool.function() for tool in self.tools],
            wanted.get(choice.type),
            named=choice.name,
            is_parallel=not choice.disable_parallel_tool_use,
        )


class CountTokensBody(_Conversation):
    """``POST /v1/messages/count_tokens``."""

    model: str

    @model_validator(mode="after")
    def _tools_go_together(self) -> CountTokensBody:
        _ = self.tool_use  # raises if they are inconsistent
        return self


class MessagesBody(_Conversation, GenerationBody):
    """``POST /v1/messages``. Besides Anthropic's fields it has the sampling parameters of the other endpoints."""

    prompt_param = "messages"

    max_tokens: int = Field(ge=1)
    stop_sequences: Stop = Field(default_factory=list)
    # The name of a beta version of output_config.format.
    output_format: OutputFormat | None = None

    n: Annotated[int, Only(1)] = 1
    container: Annotated[Any, Only(None)] = None
    mcp_servers: Annotated[Any, Only(None, [])] = None

    @property
    def token_limit(self) -> int | None:
        """``max_tokens``."""
        return self.max_tokens

    @property
    def clamps_token_limit(self) -> bool:
        """As in Anthropic's API, an answer may end at the model's context length before ``max_tokens``."""
        return True

    @property
    def top_n_log_probs(self) -> int | None:
        """None: Anthropic's API has no log probabilities."""
        return None

    @property
    def thinking_budget(self) -> int | None:
        """``thinking.budget_tokens``, which clients send to models of all kinds."""
        return None if self.thinking is None or self.thinking.type != "enabled" else self.thinking.budget_tokens

    @property
    def stop_strings(self) -> list[str]:
        """``stop_sequences``."""
        return [self.stop_sequences] if isinstance(self.stop_sequences, str) else self.stop_sequences

    @property
    def format(self) -> tuple[str, dict[str, Any] | None]:
        """``output_config.format`` and its JSON schema, or None."""
        form = self.output_format or (self.output_config.format if self.output_config is not None else None)
        return "output_config.format", None if form is None else form.definition

    @property
    def shows_thinking(self) -> bool:
        """Whether the answer has thinking blocks, if the model thinks."""
        return self.thinking is None or self.thinking.type != "disabled"

    @property
    def omits_thoughts(self) -> bool:
        """Whether the thinking blocks have no text."""
        return self.thinking is not None and self.thinking.display == "omitted"
