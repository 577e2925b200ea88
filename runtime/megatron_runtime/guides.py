"""Grammars that an answer has to keep to, from what people would rather write than ``SamplingParams.grammar``.

They are llguidance's: it knows JSON schemas, regular expressions and Lark grammars, works out a step's mask in
less than a millisecond without any table made beforehand, and its state follows from the tokens alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from llguidance import LLMatcher

from megatron_runtime.call_format import CallFormat
from megatron_runtime.errors import InvalidRequestError

_NO_TOKENS: Mapping[str, int] = {}
# Where white space is free, a small model may go on with nothing else.
_JSON_STYLE: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def json_schema_grammar(schema: Mapping[str, Any] | str) -> str:
    """JSON of a schema, on one line; ``{}`` means any JSON.

    Raises:
        InvalidRequestError: The schema is no JSON, or has what can't be kept to.
    """
    try:
        content = json.loads(schema) if isinstance(schema, str) else schema
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"the schema can't be read: {error}", field="grammar") from error
    if not isinstance(content, Mapping):
        raise InvalidRequestError("the schema must be a JSON object", field="grammar")
    return _checked(LLMatcher.grammar_from_json_schema(dict(content), overrides=_JSON_STYLE))


def regex_grammar(pattern: str) -> str:
    """Text that a regular expression matches as a whole; InvalidRequestError for one that can't be kept to."""
    return _checked(LLMatcher.grammar_from_regex(pattern))


def choice_grammar(choices: Sequence[str]) -> str:
    """One of these texts; InvalidRequestError when there is none."""
    if not choices or not all(choices):
        raise InvalidRequestError("give at least one text, and none that is empty", field="grammar")
    return _checked("start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices))


def lark_grammar(grammar: str) -> str:
    """Text of a grammar in Lark's notation with a rule ``start``; InvalidRequestError for a broken one."""
    return _checked(LLMatcher.grammar_from_lark(grammar))


def calls_grammar(
    form: CallFormat,
    functions: Mapping[str, Mapping[str, Any]],
    *,
    several: bool = True,
    or_words: bool = False,
    tokens: Mapping[str, int] = _NO_TOKENS,
) -> str:
    """Calls of functions, in a model's own form.

    Args:
        form: How calls are written.
        functions: The JSON schema of each one's arguments, by its name.
        several: Whether there may be more than one call.
        or_words: Whether there may be any words before the calls, or instead of them; the form needs a mark.
        tokens: Marks that are tokens of their own, which no text stands for.

    Raises:
        InvalidRequestError: A schema can't be kept to.
    """
    for name, schema in functions.items():
        _check_schema(name, schema)
    rules = [f"call: {' | '.join(f'f{index}' for index in range(len(functions)))}"]
    for index, (name, schema) in enumerate(functions.items()):
        head = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{form.arguments}": '
        rules.append(f'f{index}: {_lark_text(head)} a{index} "}}"')
        rules.append(f"a{index}: %json {json.dumps({**schema, 'x-guidance': _JSON_STYLE})}")
    one = f"call {_marked(form.end, tokens)}"
    further = f"({_marked(form.separator + form.begin, tokens)} {one})*" if several else ""
    rest = f"{one} {further} {_marked(form.closing, tokens)}"
    if or_words:
        rules += _words_before(form, rest, tokens)
    else:
        rules.append(f"start: {_marked(form.opening + form.begin, tokens)} {rest}")
    return lark_grammar("\n".join(rules))


def either_grammar(*grammars: str) -> str:
    """Text of any of these grammars."""
    names = [f"g{index}" for index in range(len(grammars))]
    return _composed(f"start: {' | '.join(f'@{name}' for name in names)}", dict(zip(names, grammars, strict=True)))


def after_reasoning_grammar(
    grammar: str, *, begin: str, end: str, in_reasoning: bool, tokens: Mapping[str, int] = _NO_TOKENS
) -> str:
    """Text of a grammar after free reasoning, up to the mark that ends it.

    ``in_reasoning`` says that there is reasoning, whose first mark may be missing; else there may be none.
    """
    start = "start: reasoning SPACE @answer" if in_reasoning else "start: (reasoning SPACE)? @answer"
    free = "(?s:.*)" if in_reasoning else f"\\s*{re.escape(begin)}(?s:.*)"
    if end in tokens:
        reasoning = (
            f"reasoning: ({_marked(begin, tokens)}){'?' * in_reasoning} FREE? {_marked(end, tokens)}\nFREE: /(?s:.*)/"
        )
    else:
        reasoning = f"reasoning[lazy]: {_regex(free + re.escape(end))}"
    return _composed(f"{start}\nSPACE: /\\s{{0,4}}/\n{reasoning}", {"answer": grammar})


def check_grammar(grammar: str) -> None:
    """Raises InvalidRequestError with llguidance's words when it can't keep to a grammar."""
    defect = LLMatcher.validate_grammar(grammar)
    if defect and not defect.startswith("WARNING"):
        raise InvalidRequestError(f"the grammar can't be kept to: {defect}", field="grammar")


def _check_schema(name: str, schema: Mapping[str, Any]) -> None:
    try:
        json_schema_grammar(schema)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"the parameters of {name!r}: {error}", field="grammar") from error


def _words_before(form: CallFormat, rest: str, tokens: Mapping[str, int]) -> list[str]:
    """Rules for words without the mark, or up to it and then calls."""
    opening = form.opening + form.begin
    mark = next((text for text in tokens if opening.startswith(text)), form.mark.rstrip())
    after_mark = _marked(opening[len(mark) :], tokens)
    if mark in tokens:
        return [f"start: WORDS | WORDS? {_marked(mark, tokens)} {after_mark} {rest}", "WORDS: /(?s:.*)/"]
    ends = re.escape(mark)
    return [
        f"start: WORDS | words_and_mark {after_mark} {rest}",
        f"WORDS: /(?s:.*)/ & ~{_regex(f'(?s:.*{ends}.*)')}",
        f"words_and_mark[lazy]: {_regex(f'(?s:.*){ends}')}",
    ]


def _marked(text: str, tokens: Mapping[str, int]) -> str:
    """A text in Lark's notation, with the marks in it that are tokens of their own."""
    if not tokens:
        return _lark_text(text)
    pieces = re.split(f"({'|'.join(map(re.escape, tokens))})", text)
    return " ".join(f"<[{tokens[piece]}]>" if piece in tokens else _lark_text(piece) for piece in pieces)


def _composed(start: str, grammars: Mapping[str, str]) -> str:
    """A grammar in Lark's notation whose ``@name`` stand for others."""
    parts: list[dict[str, Any]] = [{"lark_grammar": start}]
    for name, grammar in grammars.items():
        parts += _parts(name, grammar)
    return _checked(json.dumps({"grammars": parts}))


def _parts(name: str, grammar: str) -> list[dict[str, Any]]:
    if not grammar.startswith("{"):
        return [{"name": name, "lark_grammar": grammar}]
    first, *others = json.loads(grammar)["grammars"]
    return [{**first, "name": name}, *others]


def _lark_text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def _regex(pattern: str) -> str:
    return f"/{pattern.replace('/', chr(92) + '/')}/"


def _checked(grammar: str) -> str:
    check_grammar(grammar)
    return grammar
