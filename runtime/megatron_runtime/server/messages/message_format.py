"""How the served model writes its messages, and what one request makes of that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from megatron_runtime.errors import InvalidRequestError
from megatron_runtime.model.tokenizer import Tokenizer
from megatron_runtime.server.bodies.guided import AskedForm
from megatron_runtime.server.bodies.tools import ToolUse
from megatron_runtime.server.errors import ApiError
from megatron_runtime.server.messages import reasoning
from megatron_runtime.server.messages.message_reader import MessageReader
from megatron_runtime.server.messages.reasoning import ReasoningReader
from megatron_runtime.server.messages.tool_parsers.formats import HERMES, TOOL_FORMATS, ToolFormat, format_of_template
from megatron_runtime.server.parsers import REASONING_PARSERS, TOOL_PARSERS, chosen_parser

_TAIL = 64
"""Tokens at a prompt's end in which it says that the model is to think, or not to."""


@dataclass(frozen=True)
class ResponseParsing:
    """How the answers to one request are read; by default they are nothing but words."""

    tools: ToolUse = field(default_factory=ToolUse)
    format: ToolFormat | None = None
    """How calls are written, if there may be any."""
    starts_with_reasoning: bool | None = None
    """Whether the answer begins with reasoning; None where reasoning is not told from words, or there is none."""
    has_parser: bool = False
    """Whether messages have a field for reasoning."""
    tokens: dict[str, int] = field(default_factory=dict)
    """Marks that are special tokens of the model."""

    @property
    def is_plain(self) -> bool:
        """Whether there is nothing to find in an answer but words."""
        return self.format is None and self.starts_with_reasoning is None

    def call_id(self) -> str:
        """The id of a call that begins."""
        assert self.format is not None
        return self.format.call_id()

    @property
    def shown_tokens(self) -> frozenset[int]:
        """Special tokens that belong into the text that is read."""
        return frozenset(self.tokens.values())

    def new_reader(self) -> MessageReader:
        """What reads one answer."""
        return MessageReader(
            None if self.starts_with_reasoning is None else ReasoningReader(in_reasoning=self.starts_with_reasoning),
            None
            if self.format is None
            else self.format.reader(
                {function.name: function.schema_of_parameters for function in self.tools.functions}
            ),
            most_calls=None if self.tools.is_parallel else 1,
        )

    def grammar(self, words: AskedForm | None) -> str | None:
        """The grammar of the whole answer, whose words have a form or are free; None if anything goes.

        Raises:
            ApiError: 400 for parameters that can't be kept to, and for a form of words where there may be none.
        """
        if self.tools.choice == "required" and words is not None:
            message = f"{words.param}: tool_choice asks for a call, which is no answer of that form; leave one out"
            raise ApiError(400, message, param=words.param)
        grammar = None if words is None else words.grammar
        if self.format is not None:
            grammar = self._with_calls(self.format, words)
        if grammar is None or self.starts_with_reasoning is None:
            return grammar
        from megatron_runtime import guides  # not above: most services are never asked for any

        return guides.after_reasoning_grammar(
            grammar,
            begin=reasoning.BEGIN,
            end=reasoning.END,
            in_reasoning=self.starts_with_reasoning,
            tokens=self.tokens,
        )

    def _with_calls(self, written: ToolFormat, words: AskedForm | None) -> str | None:
        from megatron_runtime import guides

        try:
            if self.tools.choice == "required":
                return self._calls(written, or_words=False)
            if words is not None:
                may_call = words.is_format and written.form is not None
                calls = [self._calls(written, or_words=False)] if may_call else []
                return guides.either_grammar(words.grammar, *calls) if calls else words.grammar
            is_strict = any(function.strict for function in self.tools.functions)
            can_be = written.form is not None and bool(written.form.mark)
            return self._calls(written, or_words=True) if is_strict and can_be else None
        except InvalidRequestError as error:
            raise ApiError(400, f"tools: {error}", param="tools") from error

    def _calls(self, written: ToolFormat, *, or_words: bool) -> str:
        from megatron_runtime import guides

        assert written.form is not None
        return guides.calls_grammar(
            written.form,
            {
                function.name: function.schema_of_parameters if function.strict or not or_words else {"type": "object"}
                for function in self.tools.callable_functions
            },
            several=self.tools.is_parallel and self.tools.named is None,
            or_words=or_words,
            tokens=self.tokens,
        )


class MessageFormat:
    """What is known of the served model's messages, from its chat template and from the parsers that were chosen."""

    def __init__(self, tokenizer: Tokenizer, parsers: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._tool_parser = chosen_parser(parsers, TOOL_PARSERS)
        self._reasoning_parser = chosen_parser(parsers, REASONING_PARSERS)

    def parsing(self, tools: ToolUse, prompt: Sequence[int]) -> ResponseParsing:
        """How answers to a prompt are read.

        Raises:
            ApiError: 400 when nobody knows how the model calls tools.
        """
        written = self._format(tools)
        starts_with_reasoning = self._starts_with_reasoning(prompt)
        marks = list(written.marks if written else ())
        if starts_with_reasoning is not None:
            marks += [reasoning.BEGIN, reasoning.END]
        return ResponseParsing(
            tools=tools,
            format=written,
            starts_with_reasoning=starts_with_reasoning,
            has_parser=self._reasoning_parser is not None,
            tokens=self._tokenizer.special_tokens(marks),
        )

    def _format(self, tools: ToolUse) -> ToolFormat | None:
        if tools.choice == "none":
            return None
        known = TOOL_FORMATS[self._tool_parser] if self._tool_parser else self._format_of_template
        if tools.choice == "required":
            # Whatever the model was told of its calls, it is kept to a form that can be.
            return known if known is not None and known.form is not None else HERMES
        if known is None:
            message = (
                "tools: the model's chat template does not show how it calls them; start the server with one of "
                f"--parsers {' | '.join(TOOL_PARSERS)}, or ask for a call with tool_choice"
            )
            raise ApiError(400, message, param="tools")
        return known

    @cached_property
    def _format_of_template(self) -> ToolFormat | None:
        template = self._tokenizer.chat_template(has_tools=True)
        if template is None or not template.takes_tools:
            return HERMES  # in which the server itself tells it of tools
        return format_of_template(template.source)

    def _starts_with_reasoning(self, prompt: Sequence[int]) -> bool | None:
        if self._reasoning_parser is None:
            return None
        tail = self._tokenizer.detokenize(prompt[-_TAIL:], skip_special_tokens=False).rstrip()
        if tail.endswith(reasoning.END):
            return None
        return self._reasoning_parser == "deepseek_r1" or tail.endswith(reasoning.BEGIN)
