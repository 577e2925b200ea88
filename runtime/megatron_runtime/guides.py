"""Builds values for ``SamplingParams.grammar`` from JSON schemas, regular expressions, choices and Lark grammars.

The grammars are llguidance's. It computes a token mask in less than a millisecond without precompiled tables, and its
state depends only on the tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from llguidance import LLMatcher, LLParserLimits

from megatron_runtime.call_format import CallFormat
from megatron_runtime.call_rules import JSON_STYLE, call_rules, regex, with_special_tokens
from megatron_runtime.errors import InvalidRequestError
from megatron_runtime.guide_limits import check_expression, check_lark, check_schemas, check_texts
from megatron_runtime.guide_schemas import ascii_classes, closed_parameters, prepared_schema

LIMITS = LLParserLimits(max_items_in_row=10_000, max_grammar_size=20_000, max_lexer_states=65_536)
"""Of a grammar, for its check and for the engine. A row has an item per choice that is still possible, and the time to
prepare a grammar grows with its size: at this limit it is about 100 ms. A state takes about 500 bytes.
"""

_NO_TOKENS: Mapping[str, int] = {}


def json_schema_grammar(schema: Mapping[str, Any] | str) -> str:
    """JSON that matches a schema, on one line; ``{}`` means any JSON.

    Objects have only the properties that the schema lists, unless it allows others.

    Raises:
        InvalidRequestError: The schema is not valid JSON, or has unsupported keywords.
    """
    try:
        content = json.loads(schema) if isinstance(schema, str) else schema
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"the schema can't be read: {error}", field="grammar") from error
    if not isinstance(content, Mapping):
        raise InvalidRequestError("the schema must be a JSON object", field="grammar")
    check_schemas([content])
    try:
        grammar = LLMatcher.grammar_from_json_schema(prepared_schema(content), overrides=JSON_STYLE)
    except (ValueError, RecursionError) as error:  # a number beyond 64 bits, a lone surrogate, or deep nesting
        raise InvalidRequestError(f"the schema can't be converted: {str(error)!a}", field="grammar") from error
    return _checked(grammar)


def regex_grammar(pattern: str) -> str:
    r"""Text that fully matches a regular expression; InvalidRequestError for an unsupported one.

    ``\d``, ``\w`` and ``\s`` are those of ASCII, unless the expression begins with ``(?u)``.
    """
    check_expression(pattern)
    return _checked(LLMatcher.grammar_from_regex(ascii_classes(pattern)))


def choice_grammar(choices: Sequence[str]) -> str:
    """One of these texts; InvalidRequestError if there are none or one is empty."""
    if not choices or not all(choices):
        raise InvalidRequestError("set at least one text, and no empty ones", field="grammar")
    check_texts(choices)
    return _checked("start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices))


def lark_grammar(grammar: str) -> str:
    """Text that matches a grammar in Lark's notation with a rule ``start``; InvalidRequestError for an invalid
    grammar."""
    check_lark(grammar)
    return _from_lark(grammar)


def calls_grammar(
    form: CallFormat,
    functions: Mapping[str, Mapping[str, Any]],
    *,
    several: bool = True,
    or_text: bool = False,
    tokens: Mapping[str, int] = _NO_TOKENS,
) -> str:
    """Function calls in the model's format.

    Args:
        form: The format of the calls.
        functions: JSON schema of the arguments, by function name; without properties there are no arguments.
        several: Whether more than one call is allowed.
        or_text: Whether text is allowed before or instead of the calls; requires a format with a marker.
        tokens: Markers that are special tokens, which text can't match.

    Raises:
        InvalidRequestError: A schema is not supported.
    """
    rules = [f"call: {' | '.join(f'f{index}' for index in range(len(functions)))}"]
    for index, (name, schema) in enumerate(functions.items()):
        _check_schema(name, schema)
        try:
            rules += call_rules(f"f{index}", form, name, schema, tokens)
        except InvalidRequestError as error:
            raise InvalidRequestError(f"the parameters of {name!r}: {error}", field="grammar") from error
    check_schemas(functions.values())
    one = f"call {with_special_tokens(form.end, tokens)}"
    further = (
        f"({with_special_tokens(form.separator + form.begin, tokens)} {one})*" if several and not form.is_single else ""
    )
    rest = f"{one} {further} {with_special_tokens(form.closing, tokens)}"
    if or_text:
        rules += _text_before(form, rest, tokens)
    else:
        rules.append(f"start: {with_special_tokens(form.opening + form.begin, tokens)} {rest}")
    return _from_lark("\n".join(rules))


def either_grammar(*grammars: str) -> str:
    """Text that matches any of these grammars."""
    names = [f"g{index}" for index in range(len(grammars))]
    return _composed(f"start: {' | '.join(f'@{name}' for name in names)}", dict(zip(names, grammars, strict=True)))


def after_reasoning_grammar(
    grammar: str, *, begin: str, end: str, in_reasoning: bool, tokens: Mapping[str, int] = _NO_TOKENS
) -> str:
    """Unconstrained reasoning up to its end marker, followed by text that matches a grammar.

    With ``in_reasoning`` the answer begins with reasoning and its begin marker is optional; otherwise the reasoning is
    optional.
    """
    start = "start: reasoning SPACE @answer" if in_reasoning else "start: (reasoning SPACE)? @answer"
    free = "(?s:.*)" if in_reasoning else f"\\s*{re.escape(begin)}(?s:.*)"
    if end in tokens:
        opening, closing = with_special_tokens(begin, tokens), with_special_tokens(end, tokens)
        reasoning = f"reasoning: ({opening}){'?' * in_reasoning} FREE? {closing}\nFREE: /(?s:.*)/"
    else:
        reasoning = f"reasoning[lazy]: {regex(free + re.escape(end))}"
    return _composed(f"{start}\nSPACE: /\\s{{0,4}}/\n{reasoning}", {"answer": grammar})


def harmony_grammar(
    *,
    calls: str | None = None,
    final: str | None = None,
    may_answer: bool = True,
    tokens: Mapping[str, int] = _NO_TOKENS,
) -> str:
    """An answer in Harmony's channels, which begins after ``<|start|>assistant``.

    Args:
        calls: The grammar of a call with its header; None if there are none.
        final: The grammar of the text in the channel ``final``; None for free text.
        may_answer: Whether the answer may end in the channel ``final``.
        tokens: Markers that are special tokens, which text can't match. Without them, only thoughts may precede a call.
    """
    channel, message = (with_special_tokens(text, tokens) for text in ("<|channel|>", "<|message|>"))
    free, text, names = "FREE?", "FREE: /(?s:.*)/", '("analysis" | "commentary")'
    end = with_special_tokens("<|end|>", tokens)
    if "<|end|>" not in tokens:
        free, end, text = "text", "", f"text[lazy]: {regex('(?s:.*)' + re.escape('<|end|>'))}"
        text += "\nFREE: /(?s:.*)/"
        names = '"analysis"'  # The beginning of "commentary" would be ambiguous for the lexer.
    start = with_special_tokens("<|start|>assistant", tokens)
    ends = [f'{channel} "final" {message} {"FREE?" if final is None else "@final"}'] if may_answer else []
    ends += [] if calls is None else ["@calls"]
    lark = [
        f"start: message* ({' | '.join(ends)})",
        f"message: {channel} {names} {message} {free} {end} {start}",
        text,
    ]
    parts = {"final": final if may_answer else None, "calls": calls}
    return _composed("\n".join(lark), {name: part for name, part in parts.items() if part is not None})


def check_grammar(grammar: str) -> None:
    """Raises InvalidRequestError with llguidance's message for an unsupported grammar."""
    defect = LLMatcher.validate_grammar(grammar, limits=LIMITS)
    if defect and not defect.startswith("WARNING"):
        raise InvalidRequestError(f"the grammar is not supported: {defect}", field="grammar")


def _check_schema(name: str, schema: Mapping[str, Any]) -> None:
    try:
        json_schema_grammar(closed_parameters(schema))
    except InvalidRequestError as error:
        raise InvalidRequestError(f"the parameters of {name!r}: {error}", field="grammar") from error


def _text_before(form: CallFormat, rest: str, tokens: Mapping[str, int]) -> list[str]:
    """Rules for text without the marker, or text up to the marker and then calls."""
    opening = form.opening + form.begin
    marker = next((text for text in tokens if opening.startswith(text)), form.marker.rstrip())
    after_marker = with_special_tokens(opening[len(marker) :], tokens)
    if marker in tokens:
        return [f"start: TEXT | TEXT? {with_special_tokens(marker, tokens)} {after_marker} {rest}", "TEXT: /(?s:.*)/"]
    ends = re.escape(marker)
    return [
        f"start: TEXT | text_and_marker {after_marker} {rest}",
        f"TEXT: /(?s:.*)/ & ~{regex(f'(?s:.*{ends}.*)')}",
        f"text_and_marker[lazy]: {regex(f'(?s:.*){ends}')}",
    ]


def _composed(start: str, grammars: Mapping[str, str]) -> str:
    """A grammar in Lark's notation whose ``@name`` refer to the others."""
    parts: list[dict[str, Any]] = [{"lark_grammar": start}]
    for name, grammar in grammars.items():
        parts += _parts(name, grammar)
    return _checked(json.dumps({"grammars": parts}))


def _parts(name: str, grammar: str) -> list[dict[str, Any]]:
    if not grammar.startswith("{"):
        return [{"name": name, "lark_grammar": grammar}]
    first, *others = json.loads(grammar)["grammars"]
    return [{**first, "name": name}, *others]


def _from_lark(grammar: str) -> str:
    return _checked(LLMatcher.grammar_from_lark(grammar))


def _checked(grammar: str) -> str:
    check_grammar(grammar)
    return grammar
