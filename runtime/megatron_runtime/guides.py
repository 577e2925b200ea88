"""Grammars that an answer has to keep to, from what people would rather write than ``SamplingParams.grammar``.

They are llguidance's: it knows JSON schemas, regular expressions and Lark grammars, works out a step's mask in
less than a millisecond without any table made beforehand, and its state follows from the tokens alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from llguidance import LLMatcher

from megatron_runtime.errors import InvalidRequestError


def json_schema_grammar(schema: Mapping[str, Any] | str) -> str:
    """JSON of a schema, on one line; ``{}`` means any JSON.

    Raises:
        InvalidRequestError: The schema is no JSON, or has what can't be kept to.
    """
    try:
        content = json.loads(schema) if isinstance(schema, str) else schema
    except ValueError as error:
        raise InvalidRequestError(f"the schema can't be read: {error}", field="grammar") from error
    if not isinstance(content, Mapping):
        raise InvalidRequestError("the schema must be a JSON object", field="grammar")
    # Where white space is free, a small model may go on with nothing else.
    grammar = LLMatcher.grammar_from_json_schema(
        dict(content), overrides={"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    )
    return _checked(grammar)


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


def check_grammar(grammar: str) -> None:
    """Raises InvalidRequestError with llguidance's words when it can't keep to a grammar."""
    complaint = LLMatcher.validate_grammar(grammar)
    if complaint and not complaint.startswith("WARNING"):
        raise InvalidRequestError(f"the grammar can't be kept to: {complaint}", field="grammar")


def _checked(grammar: str) -> str:
    check_grammar(grammar)
    return grammar
