"""The format of the model's messages, and how to parse the answers to one request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from megatron_runtime.errors import InvalidRequestError
from megatron_runtime.model.tokenizer import Tokenizer
from megatron_runtime.sampling_params import SamplingParams
from megatron_runtime.server.bodies.guided import OutputConstraint
from megatron_runtime.server.bodies.tools import ToolUse
from megatron_runtime.server.errors import ApiError
from megatron_runtime.server.messages import reasoning
from megatron_runtime.server.messages.message_parser import MessageParser
from megatron_runtime.server.messages.reasoning import ReasoningParser
from megatron_runtime.server.messages.tool_parsers.formats import HERMES, TOOL_FORMATS, ToolFormat, format_of_template
from megatron_runtime.server.parsers import REASONING_PARSERS, TOOL_PARSERS, chosen_parser

_TAIL = 64
"""Number of tokens at the end of a prompt that are checked for a reasoning marker."""


@dataclass(frozen=True)
class ResponseParsing:
    """How the answers to one request are parsed; by default they are plain text."""

    tools: ToolUse = field(default_factory=ToolUse)
    format: ToolFormat | None = None
    """Format of tool calls; None if none are possible."""
    starts_with_reasoning: bool | None = None
    """Whether the answer begins with reasoning; None if there is no reasoning or it is not parsed."""
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
        return MessageParser(
            None if self.starts_with_reasoning is None else ReasoningParser(in_reasoning=self.starts_with_reasoning),
            None
            if self.format is None
            else self.format.parser(
                {function.name: function.schema_of_parameters for function in self.tools.functions}
            ),
            most_calls=None if self.tools.is_parallel else 1,
            **({} if self.format is None else {"begins_call": self.format.begins_call}),
        )

    def limit_thinking(self, params: SamplingParams) -> None:
        """Completes ``thinking_token_budget`` with the markers of the reasoning; answers without reasoning have no
        budget.

        Raises:
            ApiError: 400 without a parser for reasoning, whose markers the budget needs.
        """
        if params.thinking_token_budget is None:
            return
        if not self.has_parser:
            message = (
                "thinking_token_budget: the reasoning of the answer is unknown; start the server with one of "
                f"--parsers {' | '.join(REASONING_PARSERS)}, and send a chat or a response"
            )
            raise ApiError(400, message, param="thinking_token_budget")
        if self.starts_with_reasoning is None:
            params.thinking_token_budget = None
            return
        params.thinking_begin = "" if self.starts_with_reasoning else reasoning.BEGIN
        params.thinking_end = reasoning.END

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
            grammar = self._with_calls(self.format, constraint)
        if grammar is None or self.starts_with_reasoning is None:
            return grammar
        from megatron_runtime import guides  # Imported here, because most services never use a grammar.

        return guides.after_reasoning_grammar(
            grammar,
            begin=reasoning.BEGIN,
            end=reasoning.END,
            in_reasoning=self.starts_with_reasoning,
            tokens=self.tokens,
        )

    def _with_calls(self, tool_format: ToolFormat, constraint: OutputConstraint | None) -> str | None:
        from megatron_runtime import guides

        try:
            if self.tools.choice == "required":
                return self._calls(tool_format, or_text=False)
            if constraint is not None:
                may_call = constraint.is_response_format and tool_format.call_format is not None
                calls = [self._calls(tool_format, or_text=False)] if may_call else []
                return guides.either_grammar(constraint.grammar, *calls) if calls else constraint.grammar
            is_strict = self.tools.allowed is not None or any(
                function.strict for function in self.tools.callable_functions
            )
            is_enforceable = tool_format.call_format is not None and bool(tool_format.call_format.marker)
            return self._calls(tool_format, or_text=True) if is_strict and is_enforceable else None
        except InvalidRequestError as error:
            raise ApiError(400, f"tools: {error}", param="tools") from error

    def _calls(self, tool_format: ToolFormat, *, or_text: bool) -> str:
        from megatron_runtime import guides

        assert tool_format.call_format is not None
        return guides.calls_grammar(
            tool_format.call_format,
            {
                function.name: function.schema_of_parameters if function.strict or not or_text else _ANY_ARGUMENTS
                for function in self.tools.callable_functions
            },
            several=self.tools.is_parallel and self.tools.named is None,
            or_text=or_text,
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
        starts_with_reasoning = self._starts_with_reasoning(prompt, continued)
        markers = list(tool_format.markers if tool_format else ())
        if starts_with_reasoning is not None:
            markers += [reasoning.BEGIN, reasoning.END]
        return ResponseParsing(
            tools=tools,
            format=tool_format,
            starts_with_reasoning=starts_with_reasoning,
            has_parser=self._reasoning_parser is not None,
            tokens=self._tokenizer.special_tokens(markers),
        )

    def _format(self, tools: ToolUse) -> ToolFormat | None:
        if tools.choice == "none":
            return None
        known = TOOL_FORMATS[self._tool_parser] if self._tool_parser else self._format_of_template
        if tools.choice == "required":
            # A required call needs a format with a grammar, even if the chat template shows the model another one.
            return known if known is not None and known.call_format is not None else HERMES
        if known is None:
            message = (
                "tools: the model's chat template has no known format of tool calls; start the server with one of "
                f"--parsers {' | '.join(TOOL_PARSERS)}, or require a call with tool_choice"
            )
            raise ApiError(400, message, param="tools")
        return known

    @cached_property
    def _format_of_template(self) -> ToolFormat | None:
        template = self._tokenizer.chat_template(has_tools=True)
        if template is None or not template.takes_tools:
            return HERMES  # the format of tool_prompt.py
        return format_of_template(template.source)

    def _starts_with_reasoning(self, prompt: Sequence[int], continued: str | None) -> bool | None:
        if self._reasoning_parser is None:
            return None
        if continued is not None and continued.strip():
            return True if continued.rfind(reasoning.BEGIN) > continued.rfind(reasoning.END) else None
        tail = self._tokenizer.detokenize(prompt[-_TAIL:], skip_special_tokens=False).rstrip()
        if tail.endswith(reasoning.END):
            return None
        return self._reasoning_parser == "deepseek_r1" or tail.endswith(reasoning.BEGIN)
