"""Request bodies of the OpenAI endpoints.

Fields of OpenAI's API that the engine does not implement are declared too and accept only a neutral value, so that they
are rejected instead of silently without effect. Unknown fields are ignored, as in OpenAI's API.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from megatron_runtime.server.bodies.effort import Effort, Verbosity, effort_variables
from megatron_runtime.server.bodies.limits import (
    MAX_CHOICES,
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TEMPLATE_CHARACTERS,
    MAX_TOOLS,
    FirstError,
    GuidedChoices,
    GuidedJson,
    GuidedText,
    Identifier,
    Metadata,
    Stop,
    TokenIds,
)
from megatron_runtime.server.bodies.null_fields import NullMeansAbsent
from megatron_runtime.server.bodies.only import Only
from megatron_runtime.server.bodies.output_formats import ResponseFormat, StructuredOutputs
from megatron_runtime.server.bodies.sampling_fields import SamplingFields, parameter
from megatron_runtime.server.bodies.tools import (
    AllowedTools,
    AnyToolChoice,
    NamedTool,
    Tool,
    ToolCall,
    ToolUse,
    tool_use,
)
from megatron_runtime.server.bodies.vllm_fields import VllmFields


class StreamOptions(BaseModel):
    """Options of a streamed answer."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: Annotated[bool, Only(False)] = False


class GenerationBody(NullMeansAbsent, SamplingFields, VllmFields, ABC):
    """Fields that chat and text completions share."""

    prompt_param: ClassVar[str]
    """The field that the prompt comes from."""

    model: str
    n: int = parameter("n", le=MAX_CHOICES)
    seed: int | None = None
    stop: Stop = Field(default_factory=list)
    stream: bool = False
    stream_options: StreamOptions | None = None
    streaming_interval: int = parameter("streaming_interval")
    stream_interval: int | None = Field(None, ge=1)
    """vLLM's name of ``streaming_interval``, which is used instead if it is set."""
    timeout: float | None = Field(None, gt=0)
    return_token_ids: bool = False
    return_tokenized_data: bool = False
    return_raw_text: bool = False
    add_bos: bool | None = Field(None, alias="add_BOS")
    response_format: ResponseFormat | None = None
    guided_json: GuidedJson | None = None
    guided_regex: GuidedText | None = None
    guided_choice: GuidedChoices | None = None
    guided_grammar: GuidedText | None = None
    structured_outputs: StructuredOutputs | None = None

    # Fields of OpenAI's clients that do not influence the answer.
    user: Identifier | None = None
    metadata: Metadata | None = None
    store: bool | None = None
    service_tier: Identifier | None = None
    safety_identifier: Identifier | None = None
    prompt_cache_key: Identifier | None = None

    @model_validator(mode="after")
    def _stream_options_belong_to_a_stream(self) -> GenerationBody:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only allowed together with stream: true")
        return self

    @model_validator(mode="after")
    def _stream_interval_is_another_name(self) -> GenerationBody:
        if self.stream_interval is not None and "streaming_interval" not in self.model_fields_set:
            self.streaming_interval = self.stream_interval
        return self

    @model_validator(mode="after")
    def _scores_of_prompts_are_not_streamed(self) -> GenerationBody:
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("prompt_logprobs is not available in streams; set stream to false")
        return self

    @model_validator(mode="after")
    def _tools_go_together(self) -> GenerationBody:
        _ = self.tool_use  # raises if they are inconsistent
        return self

    @property
    @abstractmethod
    def token_limit(self) -> int | None:
        """Maximum number of tokens to generate; None means as many as fit."""

    @property
    def limit_param(self) -> str:
        """The field that ``token_limit`` comes from."""
        return "max_tokens"

    @property
    def clamps_token_limit(self) -> bool:
        """Whether a limit that exceeds the context length is reduced, instead of an error."""
        return False

    @property
    @abstractmethod
    def top_n_log_probs(self) -> int | None:
        """Number of most likely tokens to report with each log probability; None for no log probabilities."""

    @property
    def format(self) -> tuple[str, dict[str, Any] | None]:
        """The name of the field with the format of the answer, and its JSON schema or None."""
        return "response_format", None if self.response_format is None else self.response_format.schema_to_keep

    @property
    def has_grammar(self) -> bool:
        """Whether a grammar may have to be compiled, which can take a tenth of a second."""
        guides = (self.guided_json, self.guided_regex, self.guided_choice, self.guided_grammar, self.structured_outputs)
        return any(guide is not None for guide in (*guides, self.format[1])) or bool(self.tool_use.functions)

    @cached_property
    def tool_use(self) -> ToolUse:
        """The tools of the request and which may be called; no tools by default."""
        return ToolUse()

    @property
    def thinking_budget(self) -> int | None:
        """Most tokens of the reasoning, from a field that has no effect where the reasoning can't be limited."""
        return None

    @property
    def is_echoed(self) -> bool:
        """Whether the answer begins with the prompt."""
        return False

    @property
    def scores_prompt(self) -> bool:
        """Whether log probabilities of the prompt are reported too."""
        return self.prompt_logprobs is not None or self.is_echoed

    @property
    def scored_tokens(self) -> int | None:
        """Number of most likely tokens that the engine reports for answer and prompt; None: no log probabilities."""
        wanted = [count for count in (self.top_n_log_probs, self.prompt_logprobs) if count is not None]
        return max(wanted, default=None)

    @property
    def stop_strings(self) -> list[str]:
        """The stop strings as a list."""
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk that carries the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def include_continuous_usage(self) -> bool:
        """Whether each chunk of a stream carries the usage so far."""
        return self.include_usage and self.stream_options is not None and self.stream_options.continuous_usage_stats


class ContentPart(BaseModel):
    """One part of a message; text is the only supported type."""

    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """One message. Other fields are passed to the chat template unchanged."""

    model_config = ConfigDict(extra="allow")

    role: str = Field(min_length=1)
    content: str | Annotated[list[ContentPart], Field(max_length=MAX_PARTS), FirstError()] | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOLS), FirstError()] | None = None
    prompt_token_ids: TokenIds | None = None
    generation_token_ids: TokenIds | None = None

    @property
    def has_tokens(self) -> bool:
        """Whether this is an earlier answer with the token ids that it consists of."""
        return self.role == "assistant" and bool(self.prompt_token_ids) and bool(self.generation_token_ids)

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates expect it: content is one string."""
        message = self.model_dump(exclude_none=True, exclude={"prompt_token_ids", "generation_token_ids", "tool_calls"})
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        if isinstance(self.content, list):
            message["content"] = "".join(part.text for part in self.content)
        message.setdefault("content", "")
        if self.role == "developer":
            message["role"] = "system"  # OpenAI's newer name, unknown to chat templates
        return message


class ChatCompletionBody(GenerationBody):
    """``POST /v1/chat/completions``."""

    prompt_param = "messages"

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES), FirstError()]
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    chat_template: Annotated[str, Field(max_length=MAX_TEMPLATE_CHARACTERS)] | None = None
    documents: Annotated[list[dict[str, Any]], Field(max_length=MAX_PARTS)] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    echo: bool = False
    reasoning_effort: Effort | None = None
    verbosity: Verbosity | None = None
    prevent_retokenization: bool = True
    skip_prompt_log_probs: bool = True

    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS), FirstError()] = Field(default_factory=list)
    tool_choice: AnyToolChoice | None = None
    parallel_tool_calls: bool = True
    include_reasoning: bool = True

    functions: Annotated[list[Any] | None, Only(None, [])] = None
    function_call: Annotated[Any, Only(None, "none", "auto")] = None
    modalities: Annotated[list[str] | None, Only(None, ["text"])] = None
    audio: Annotated[Any, Only(None)] = None
    web_search_options: Annotated[Any, Only(None)] = None

    @model_validator(mode="after")
    def _top_logprobs_needs_logprobs(self) -> ChatCompletionBody:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs is only allowed together with logprobs: true")
        return self

    @model_validator(mode="after")
    def _a_continued_message_has_no_generation_prompt(self) -> ChatCompletionBody:
        if not self.continue_final_message:
            return self
        if self.add_generation_prompt and "add_generation_prompt" in self.model_fields_set:
            raise ValueError("add_generation_prompt must be false together with continue_final_message: true")
        self.add_generation_prompt = False
        return self

    @property
    def template_variables(self) -> dict[str, Any]:
        """What the chat template gets beside messages and tools; ``chat_template_kwargs`` override other fields."""
        documents = {} if self.documents is None else {"documents": self.documents}
        return {**effort_variables(self.reasoning_effort, self.verbosity), **documents, **self.chat_template_kwargs}

    @property
    def echoed_message(self) -> str:
        """What the answer begins with: the last message if ``echo`` is set and it is the assistant's."""
        last = self.messages[-1]
        return str(last.for_template()["content"]) if self.echo and last.role == "assistant" else ""

    @property
    def token_limit(self) -> int | None:
        """Maximum number of tokens to generate; None means as many as fit."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def limit_param(self) -> str:
        """The field that ``token_limit`` comes from."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def top_n_log_probs(self) -> int | None:
        """``top_logprobs``, if ``logprobs`` is set."""
        return self.top_logprobs if self.logprobs else None

    @property
    def scores_prompt(self) -> bool:
        """``prompt_logprobs``, or ``skip_prompt_log_probs: false`` if ``logprobs`` asks for any."""
        return self.prompt_logprobs is not None or (self.logprobs and not self.skip_prompt_log_probs)

    @cached_property
    def tool_use(self) -> ToolUse:
        """The combination of ``tools``, ``tool_choice`` and ``parallel_tool_calls``."""
        choice, functions = self.tool_choice, [tool.function for tool in self.tools]
        parallel = self.parallel_tool_calls
        match choice:
            case NamedTool():
                return tool_use(functions, None, named=choice.function.name, is_parallel=parallel)
            case AllowedTools():
                return tool_use(functions, choice.mode, named=None, allowed=choice.names, is_parallel=parallel)
        return tool_use(functions, choice, named=None, is_parallel=parallel)


class CompletionBody(GenerationBody):
    """``POST /v1/completions``."""

    prompt_param = "prompt"

    prompt: str | TokenIds | Annotated[list[str], FirstError()] | Annotated[list[TokenIds], FirstError()]
    max_tokens: int = Field(16, ge=0)
    logprobs: int | None = Field(None, ge=0, le=20)

    echo: bool = False

    suffix: Annotated[str | None, Only(None, "")] = None

    @property
    def token_limit(self) -> int | None:
        """``max_tokens``."""
        return self.max_tokens

    @property
    def top_n_log_probs(self) -> int | None:
        """``logprobs``."""
        return self.logprobs

    @property
    def is_echoed(self) -> bool:
        """``echo``."""
        return self.echo

    @property
    def prompts(self) -> list[str | list[int]]:
        """The list of prompts. A flat list of numbers is one tokenized prompt."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [[token for token in self.prompt if isinstance(token, int)]]
        return [prompt for prompt in self.prompt if not isinstance(prompt, int)]
