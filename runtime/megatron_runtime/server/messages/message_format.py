"""The format of the model's messages, and how to parse the answers to one request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from megatron_runtime.call_format import CallFormat
from megatron_runtime.errors import InvalidRequestError
from megatron_runtime.model.tokenizer import Tokenizer
from megatron_runtime.sampling_params import SamplingParams
from megatron_runtime.server.bodies.guided import OutputConstraint
from megatron_runtime.server.bodies.tools import ToolUse
from megatron_runtime.server.errors import ApiError
from megatron_runtime.server.messages.message_parser import MessageParser
from megatron_runtime.server.messages.reasoning import REASONING_STYLES, THINK, ReasoningParser, ReasoningStyle
from megatron_runtime.server.messages.tool_parsers.formats import HARMONY, HERMES, TOOL_FORMATS, format_of_template
from megatron_runtime.server.messages.tool_parsers.tool_format import ToolFormat
from megatron_runtime.server.parsers import REASONING_PARSERS, TOOL_PARSERS, chosen_parser

_HARMONY_REASONING = "openai_gptoss"
_TAIL = 64
"""Number of tokens at the end of a prompt that are checked for a reasoning marker."""


@dataclass(frozen=True)
class ResponseParsing:
    """How the answers to one request are parsed; by default they are plain text."""

    tools: ToolUse = field(default_factory=ToolUse)
    format: ToolFormat | None = None
    """Format of tool calls; None if none are possible and the answer has no channels."""
    starts_with_reasoning: bool | None = None
    """Whether the answer begins with reasoning; None if there is no reasoning or it is not parsed."""
    style: ReasoningStyle = THINK
    """The markers of the reasoning."""
    has_parser: bool = False
    """Whether a reasoning parser is configured, so that messages have a field for reasoning."""
    tokens: dict[str, int] = field(default_factory=dict)
    """Markers that are special tokens of the model, by text."""

    @property
    def is_plain(self) -> bool:
        """Whether the answer is plain text, without tool calls and reasoning to parse."""
        return self.format is None and self.starts_with_reasoning is None

    def call_id(self) -> str:
        """An id for a new call."""
        assert self.format is not None
        return self.format.call_id()

    @property
    def shown_tokens(self) -> frozenset[int]:
        """Special tokens to keep in the text, for the parsers."""
        return frozenset(self.tokens.values())

    def new_parser(self) -> MessageParser:
        """A parser for one answer."""
        most_calls = None if self.tools.is_parallel else 1
        if self.starts_with_reasoning is None:
            thoughts = None
        else:
            thoughts = ReasoningParser(in_reasoning=self.starts_with_reasoning, style=self.style)
        if self.format is None:
            return MessageParser(thoughts, None, most_calls=most_calls)
        functions = () if self.tools.choice == "none" else self.tools.functions
        schemas = {function.name: function.schema_of_parameters for function in functions}
        calls = self.format.parser(schemas)
        return MessageParser(
            thoughts,
            calls,
            most_calls=most_calls,
            begins_call=self.format.begins_call,
            requires_call=self.tools.choice == "required",
        )

    def limit_thinking(self, params: SamplingParams, budget: int | None = None) -> None:
        """Completes ``thinking_token_budget`` with the markers of the reasoning; answers without reasoning have no
        budget.

        Args:
            params: The parameters of the answer.
            budget: In place of a missing ``thinking_token_budget``, if the reasoning can be limited.

        Raises:
            ApiError: 400 for a ``thinking_token_budget`` if the reasoning can't be limited: without a parser for it,
                or in a channel of its own.
        """
        if params.thinking_token_budget is None and self.has_parser and not self._has_channels:
            params.thinking_token_budget = budget
        if params.thinking_token_budget is None:
            return
        if not self.has_parser:
            message = (
                "thinking_token_budget: the reasoning of the answer is unknown; start the server with one of "
                f"--parsers {' | '.join(REASONING_PARSERS)}, and send a chat or a response"
            )
            raise ApiError(400, message, param="thinking_token_budget")
        if self._has_channels:
            message = (
                "thinking_token_budget: reasoning in a channel of its own has no budget; leave this field out, or use "
                "reasoning_effort"
            )
            raise ApiError(400, message, param="thinking_token_budget")
        if self.starts_with_reasoning is None:
            params.thinking_token_budget = None
            return
        params.thinking_begin = "" if self.starts_with_reasoning else self.style.begins[0]
        params.thinking_end = self.style.ends[0]

    @property
    def _has_channels(self) -> bool:
        return self.format is not None and self.format.has_channels

    def grammar(self, constraint: OutputConstraint | None) -> str | None:
        """The grammar of the whole answer, with ``constraint`` on its content; None for unconstrained answers.

        Raises:
            ApiError: 400 for a schema that is not supported, and for a guided answer if a call is required. As in
                OpenAI's API, a response format has no effect then.
        """
        if self.tools.choice == "required" and constraint is not None and not constraint.is_response_format:
            message = f"{constraint.param}: tool_choice requires a call, which can't match this format; leave one out"
            raise ApiError(400, message, param=constraint.param)
        grammar = None if constraint is None else constraint.grammar
        if self.format is not None:
            try:
                grammar = self._of_format(self.format, constraint)
            except InvalidRequestError as error:
                raise ApiError(400, f"tools: {error}", param="tools") from error
        if grammar is None or self.starts_with_reasoning is None:
            return grammar
        from megatron_runtime import guides  # Imported here, because most services never use a grammar.

        return guides.after_reasoning_grammar(
            grammar,
            begin=self.style.begins[0],
            end=self.style.ends[0],
            in_reasoning=self.starts_with_reasoning,
            tokens=self.tokens,
        )

    def _of_format(self, tool_format: ToolFormat, constraint: OutputConstraint | None) -> str | None:
        form = tool_format.call_format
        if tool_format.has_channels:
            return self._in_channels(form, constraint)
        from megatron_runtime import guides

        if self.tools.choice == "required":
            return self._calls(form)
        if constraint is not None:
            calls = [self._calls(form)] if constraint.is_response_format else []
            return guides.either_grammar(constraint.grammar, *calls) if calls else constraint.grammar
        return self._calls(form, is_required=False) if self._is_strict and form.has_marker else None

    def _in_channels(self, form: CallFormat, constraint: OutputConstraint | None) -> str | None:
        from megatron_runtime import guides

        final = None if constraint is None else constraint.grammar
        if self.tools.choice == "required":
            return guides.harmony_grammar(calls=self._calls(form), may_answer=False, tokens=self.tokens)
        if constraint is not None:
            may_call = constraint.is_response_format and self.tools.choice != "none"
            return guides.harmony_grammar(
                calls=self._calls(form) if may_call else None, final=final, tokens=self.tokens
            )
        if self.tools.choice == "none" or not self._is_strict:
            return None
        calls = self._calls(form, is_required=False, or_text=False)
        return guides.harmony_grammar(calls=calls, tokens=self.tokens)

    @property
    def _is_strict(self) -> bool:
        """Whether a grammar enforces the calls that the model chooses to make."""
        return self.tools.allowed is not None or any(function.strict for function in self.tools.callable_functions)

    def _calls(self, form: CallFormat, *, is_required: bool = True, or_text: bool | None = None) -> str:
        """A grammar for calls. Unless they are required, it permits text too, and any arguments without ``strict``."""
        from megatron_runtime import guides

        return guides.calls_grammar(
            form,
            {
                function.name: function.schema_of_parameters if function.strict or is_required else _ANY_ARGUMENTS
                for function in self.tools.callable_functions
            },
            several=self.tools.is_parallel and self.tools.named is None,
            or_text=not is_required if or_text is None else or_text,
            tokens=self.tokens,
        )


_ANY_ARGUMENTS = {"type": "object", "additionalProperties": True}


class MessageFormat:
    """Format of the model's messages, from its chat template and the configured parsers."""

    def __init__(self, tokenizer: Tokenizer, parsers: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._tool_parser = chosen_parser(parsers, TOOL_PARSERS)
        self._reasoning_parser = chosen_parser(parsers, REASONING_PARSERS)

    def parsing(self, tools: ToolUse, prompt: Sequence[int], continued: str | None = None) -> ResponseParsing:
        """How the answers to a prompt are parsed.

        Args:
            tools: The tools of the request.
            prompt: Its tokens.
            continued: The beginning of the answer if it is part of the prompt.

        Raises:
            ApiError: 400 when the format of the model's tool calls is unknown.
        """
        tool_format = self._format(tools)
        style = self._style
        starts_with_reasoning = None if style is None else self._starts_with_reasoning(style, prompt, continued)
        markers = list(tool_format.markers if tool_format else ())
        if style is not None and starts_with_reasoning is not None:
            markers += style.markers
        has_channels = tool_format is not None and tool_format.has_channels
        special = self._tokenizer.special_tokens(markers)
        return ResponseParsing(
            tools=tools,
            format=tool_format,
            starts_with_reasoning=starts_with_reasoning,
            style=style or THINK,
            has_parser=self._reasoning_parser is not None or has_channels,
            # A token that ends the answer is not part of its text.
            tokens={text: token for text, token in special.items() if token not in self._tokenizer.eos_token_ids},
        )

    @cached_property
    def tool_format(self) -> ToolFormat | None:
        """The configured format of tool calls, or that of the chat template; None if it is unknown."""
        template = self._tokenizer.chat_template(has_tools=True)
        found = None if template is None else format_of_template(template.source)
        if self._reasoning_parser == _HARMONY_REASONING:
            return HARMONY
        if self._tool_parser is not None:
            is_found = found is not None and found.name == self._tool_parser
            return found if is_found else TOOL_FORMATS[self._tool_parser]
        if found is None and (template is None or not template.takes_tools):
            return HERMES  # tool_prompt.py describes it
        return found

    @cached_property
    def _style(self) -> ReasoningStyle | None:
        has_channels = self.tool_format is not None and self.tool_format.has_channels
        return None if has_channels or self._reasoning_parser is None else REASONING_STYLES[self._reasoning_parser]

    def _format(self, tools: ToolUse) -> ToolFormat | None:
        known = self.tool_format
        if tools.choice == "none":
            return known if known is not None and known.has_channels else None
        if known is None and tools.choice == "required":
            return HERMES  # A required call needs a format with a grammar, even if the model knows another one.
        if known is None:
            message = (
                "tools: the model's chat template has no known format of tool calls; start the server with one of "
                f"--parsers {' | '.join(TOOL_PARSERS)}, or require a call with tool_choice"
            )
            raise ApiError(400, message, param="tools")
        return known

    def _starts_with_reasoning(
        self, style: ReasoningStyle, prompt: Sequence[int], continued: str | None
    ) -> bool | None:
        if continued is not None and continued.strip():
            return True if _last_of(style.begins, continued) > _last_of(style.ends, continued) else None
        tail = self._tokenizer.detokenize(prompt[-_TAIL:], skip_special_tokens=False).rstrip()
        if tail.endswith(style.ends):
            return None
        return style.is_certain or tail.endswith(style.begins)


def _last_of(markers: Sequence[str], text: str) -> int:
    """The last index of any of the markers; -1 if there is none."""
    return max(text.rfind(marker) for marker in markers)
