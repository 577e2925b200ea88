"""Tools in request bodies: definitions, tool choice, and calls of earlier turns."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Discriminator, Field, Tag, model_validator

from megatron_runtime.server.bodies.call_arguments import JoinableArguments
from megatron_runtime.server.bodies.limits import MAX_TOOLS, FirstError, Schema

LONGEST_NAME = 128
ToolChoice = Literal["none", "auto", "required"]
NO_PARAMETERS: dict[str, Any] = {"properties": {}}
"""The schema of a function without parameters."""


TOOL_TYPES = ("function",)


def _known_type(value: Any) -> Any:
    if value not in TOOL_TYPES:
        raise ValueError(f"{value!r} is not a known type of tools; use {' or '.join(map(repr, TOOL_TYPES))}")
    return value


ToolType = Annotated[Literal["function"], BeforeValidator(_known_type)]


class TypedTool(BaseModel):
    """A base class after which ``type`` is validated first: other types have other fields."""

    type: ToolType


class FunctionDefinition(BaseModel):
    """A function that the model may call. ``strict`` enforces the schema of the parameters even if no call is
    required."""

    name: str = Field(min_length=1, max_length=LONGEST_NAME)
    description: str | None = None
    parameters: Schema | None = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _parameters_are_an_object(self) -> FunctionDefinition:
        if self.parameters is not None and self.parameters.get("type", "object") != "object":
            raise ValueError("parameters must be the schema of an object: set type to 'object', or leave it out")
        return self

    @property
    def schema_of_parameters(self) -> dict[str, Any]:
        """The JSON schema of the arguments."""
        return {"type": "object", **(self.parameters or NO_PARAMETERS)}

    def for_template(self) -> dict[str, Any]:
        """The tool in the format of chat templates."""
        described = {} if self.description is None else {"description": self.description}
        return {
            "type": "function",
            "function": {"name": self.name, **described, "parameters": self.schema_of_parameters},
        }


class Tool(BaseModel):
    """A tool; functions are the only kind."""

    type: ToolType
    function: FunctionDefinition


class NamedFunction(BaseModel):
    """The name of a function."""

    name: str


class NamedTool(BaseModel):
    """The tool that the model must call."""

    type: ToolType
    function: NamedFunction


class AllowedFunctions(BaseModel):
    """Some of the tools, and whether one of them must be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS), FirstError()]


class AllowedTools(BaseModel):
    """Limits the calls to some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedFunctions

    @property
    def mode(self) -> ToolChoice:
        """Whether a call is required."""
        return self.allowed_tools.mode

    @property
    def names(self) -> list[str]:
        """The names of the functions."""
        return [tool.function.name for tool in self.allowed_tools.tools]


class CalledFunction(BaseModel):
    """A call of an earlier turn. ``arguments`` is JSON."""

    name: str
    arguments: str = "{}"

    @model_validator(mode="after")
    def _arguments_are_an_object(self) -> CalledFunction:
        if not isinstance(_object(self.arguments), dict):
            raise ValueError("the arguments of a call must be a JSON object")
        return self

    def for_template(self) -> dict[str, Any]:
        """The call in the format of chat templates: with the arguments as a mapping."""
        return {"name": self.name, "arguments": JoinableArguments(_object(self.arguments))}


class ToolCall(BaseModel):
    """A call in an assistant's message."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        """The call in the format of chat templates."""
        name = {} if self.id is None else {"id": self.id}
        return {**name, "type": "function", "function": self.function.for_template()}


@dataclass(frozen=True)
class ToolUse:
    """The tools of a request and how they may be used."""

    functions: tuple[FunctionDefinition, ...] = ()
    choice: ToolChoice = "none"
    named: str | None = None
    """The only function that may be called; it must be called."""
    allowed: frozenset[str] | None = None
    """The functions that may be called; None for all."""
    is_parallel: bool = True
    """Whether one answer may have several calls."""

    @property
    def callable_functions(self) -> list[FunctionDefinition]:
        """The functions that this answer may call."""
        if self.choice == "none":
            return []
        return [function for function in self._allowed_functions if self.named in (None, function.name)]

    @property
    def _allowed_functions(self) -> list[FunctionDefinition]:
        return [function for function in self.functions if self.allowed is None or function.name in self.allowed]

    def for_template(self) -> list[dict[str, Any]] | None:
        """The tools for the chat template; None if none may be called.

        A model is shown only allowed functions: the format of its calls may have no grammar that excludes the others.
        """
        return [function.for_template() for function in self._allowed_functions] if self.choice != "none" else None


def tool_use(
    functions: Sequence[FunctionDefinition],
    choice: ToolChoice | None,
    *,
    named: str | None,
    is_parallel: bool,
    allowed: Sequence[str] | None = None,
) -> ToolUse:
    """The combination of a body's fields about tools.

    Raises:
        ValueError: The fields are inconsistent; the message begins with the field's name.
    """
    names = [function.name for function in functions]
    twice = next((name for name, count in Counter(names).items() if count > 1), None)
    if twice is not None:
        raise ValueError(f"tools has two functions named {twice!r}; rename one")
    wants_call = named is not None or choice == "required"
    if wants_call and not functions:
        raise ValueError("tool_choice requires a call, but there are no tools")
    if named is not None and named not in names:
        raise ValueError(f"tool_choice names {named!r}, which is not one of the tools")
    unknown = next((name for name in allowed or () if name not in names), None)
    if unknown is not None:
        raise ValueError(f"tool_choice allows {unknown!r}, which is not one of the tools")
    chosen: ToolChoice = "required" if wants_call else "none" if choice == "none" or not functions else "auto"
    limited = None if allowed is None else frozenset(allowed)
    return ToolUse(tuple(functions), chosen, named, limited, is_parallel)


def _kind_of_choice(value: Any) -> str | None:
    if isinstance(value, str):
        return "Word"
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return _CHOICE_KINDS.get(kind) if isinstance(kind, str) else None


_CHOICE_KINDS = {"function": "Named", "allowed_tools": "Allowed"}
CHOICE_KIND = Discriminator(
    _kind_of_choice,
    custom_error_type="tool_choice_type",
    custom_error_message=f"must be none, auto, required, or an object of type {' or '.join(_CHOICE_KINDS)}",
)
"""Selects the type of ``tool_choice`` with the tag Word, Named or Allowed."""
AnyToolChoice = Annotated[
    Annotated[ToolChoice, Tag("Word")] | Annotated[NamedTool, Tag("Named")] | Annotated[AllowedTools, Tag("Allowed")],
    CHOICE_KIND,
]
"""``tool_choice`` of a chat."""


def _object(arguments: str) -> Any:
    try:
        return json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return None
