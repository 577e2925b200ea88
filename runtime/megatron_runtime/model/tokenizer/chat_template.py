"""Chat templates: Jinja programs of checkpoints, run in a sandbox with Hugging Face's helper functions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from megatron_runtime.errors import InvalidRequestError

Message = Mapping[str, Any]
"""A chat message, with at least ``role`` and ``content``."""


class ChatTemplate:
    """One template; compiled at its first use, because a model that is used without chats may have a broken one."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        """The source of the template."""
        self._special_tokens = special_tokens

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        **template_kwargs: Any,
    ) -> str:
        """The prompt. Raises InvalidRequestError with the template's message when it rejects the messages."""
        variables = {
            **self._special_tokens,
            **template_kwargs,
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._template.render(variables)
        except (jinja2.TemplateError, TypeError, ValueError, AttributeError, LookupError) as error:
            raise InvalidRequestError(
                f"messages: the model's chat template refuses them: {error}", field="messages"
            ) from error

    @property
    def takes_tools(self) -> bool:
        """Whether it uses the tools; False for a template that can't be parsed."""
        return self.takes("tools")

    def takes(self, variable: str) -> bool:
        """Whether it uses a variable; False for a template that can't be parsed."""
        return variable in self._variables

    @cached_property
    def _variables(self) -> frozenset[str]:
        try:
            tree = self._environment.parse(self.source)
        except jinja2.TemplateError:
            return frozenset()
        return frozenset(meta.find_undeclared_variables(tree))

    @cached_property
    def _template(self) -> jinja2.Template:
        template = self._environment.from_string(self.source)
        # A plain dictionary: jinja2's own chain of maps would slow down each lookup.
        template.globals = dict(template.globals)
        return template

    @cached_property
    def _environment(self) -> ImmutableSandboxedEnvironment:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _now
        return environment


class _GenerationTag(Extension):
    """``{% generation %}...{% endgeneration %}`` marks the assistant's text for training; here it is its body."""

    tags = {"generation"}  # noqa: RUF012 - the attribute is jinja2's

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Unlike jinja2's own filter, this one doesn't escape HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)
