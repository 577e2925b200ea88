"""Rules in Lark's notation for the arguments of function calls, and the notation of texts and special tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from megatron_runtime.call_format import CallFormat, ParameterFormat
from megatron_runtime.errors import InvalidRequestError
from megatron_runtime.guide_schemas import closed_parameters, prepared_schema, value_types
from megatron_runtime.schema_parts import OPEN, joins, resolved

# With flexible white space a small model may generate white space without end.
JSON_STYLE: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def call_rules(
    rule: str, form: CallFormat, name: str, schema: Mapping[str, Any], tokens: Mapping[str, int]
) -> list[str]:
    """Rules for one call of a function, without the delimiters; the first is ``rule``.

    Raises:
        InvalidRequestError: The function can't be written in this format.
    """
    if not form.is_object and not re.fullmatch(form.names, name):
        message = f"the name {name!r} can't be written in this model's format of calls; use letters, digits, _ and -"
        raise InvalidRequestError(message, field="grammar")
    arguments = f"{rule}_a"
    if form.is_object:
        head = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{form.arguments}": '
        call = f'{rule}: {lark_text(head)} {arguments} "}}"'
    else:
        pieces = re.split(r"(\{name\}|\{index\})", form.head)
        known = {"{name}": lark_text(name), "{index}": "/[0-9]{1,4}/"}
        before = " ".join(known.get(piece) or with_special_tokens(piece, tokens) for piece in pieces)
        call = f"{rule}: {before} {arguments} {with_special_tokens(form.tail, tokens)}"
    whole = prepared_schema(closed_parameters(schema))
    if form.parameters is None:
        return [call, f"{arguments}: {_json_rule(whole)}"]
    return [call, *_NamedArguments(arguments, form.parameters, whole, tokens).rules()]


class _NamedArguments:
    """Rules for arguments that are not a JSON object, in the order of the properties."""

    def __init__(self, rule: str, form: ParameterFormat, schema: Mapping[str, Any], tokens: Mapping[str, int]) -> None:
        self._rule = rule
        self._form = form
        self._schema = schema
        self._tokens = tokens
        self._marker = form.after.strip()

    def rules(self) -> list[str]:
        """All rules; the first is for the arguments."""
        joined = joins(self._schema)
        if joined:
            message = f"{joined[0]!r} at the top of the schema is not supported in this model's format of calls; list "
            raise InvalidRequestError(f"{message}the parameters in 'properties'", field="grammar")
        properties = self._schema.get("properties", {})
        required = self._schema.get("required", ())
        rules = [f"{self._rule}: {self._rule}_0_first"]
        separator = lark_text(self._form.separator)
        for index, (key, schema) in enumerate(properties.items()):
            one = f"{self._rule}_p{index}"
            following = f"{self._rule}_{index + 1}"
            # One rule for the arguments from here on without and with arguments before them.
            for state, before in (("first", ""), ("rest", separator)):
                skipped = "" if key in required else f" | {following}_{state}"
                rules.append(f"{self._rule}_{index}_{state}: {before} {one} {following}_rest{skipped}")
            rules += self._property(one, key, schema)
        return [*rules, *self._additional(len(properties), separator)]

    def _additional(self, count: int, separator: str) -> list[str]:
        first, rest = f"{self._rule}_{count}_first", f"{self._rule}_{count}_rest"
        is_open = "patternProperties" in self._schema
        if not is_open and not any(self._schema.get(keyword, False) is not False for keyword in OPEN):
            return [f'{first}: ""', f'{rest}: ""']
        one = f"{self._rule}_any"
        head = self._form.before.partition("{key}")
        key = regex(self._form.keys)
        before = f"{with_special_tokens(head[0], self._tokens)} {key} {with_special_tokens(head[2], self._tokens)}"
        value = self._text("(?s:.*)", f"{one}_v") if self._form.has_plain_text else [f"{one}_v: {_json_rule({})}"]
        return [
            f"{first}: ({one} {rest})?",
            f"{rest}: ({separator} {one})*",
            f"{one}: {before} {one}_v {self._after(is_text=self._form.has_plain_text)}",
            *value,
        ]

    def _property(self, rule: str, key: str, schema: Any) -> list[str]:
        if not re.fullmatch(self._form.keys, key):
            message = (
                f"the parameter {key!r} can't be written in this model's format of calls; use letters, digits and _"
            )
            raise InvalidRequestError(message, field="grammar")
        before = with_special_tokens(self._form.before.replace("{key}", key), self._tokens)
        is_text = self._form.has_plain_text and "string" in value_types(schema, self._schema)
        known = resolved(schema, self._schema)
        options = known.get("enum", [known["const"]] if "const" in known else None)
        if is_text and options:
            texts = " | ".join(lark_text(text if isinstance(text, str) else json.dumps(text)) for text in options)
            return [f"{rule}: {before} ({texts or chr(34) * 2}) {self._after(is_text=False)}"]
        if is_text:
            value = self._text(_text_pattern(known), f"{rule}_v")
        else:
            definitions = {name: self._schema[name] for name in ("$defs", "definitions") if name in self._schema}
            content = {**schema, **definitions} if isinstance(schema, Mapping) else {}
            value = [f"{rule}_v: {_json_rule(content)}"]
        return [f"{rule}: {before} {rule}_v {self._after(is_text=is_text)}", *value]

    def _text(self, pattern: str, rule: str) -> list[str]:
        """Rules for plain text and the marker after it."""
        lead = re.escape(self._form.after[: self._form.after.index(self._marker)])
        if self._marker in self._tokens:
            is_any = "?" if pattern == "(?s:.*)" else ""
            name = rule.upper()
            return [f"{rule}: {name}{is_any} <[{self._tokens[self._marker]}]>", f"{name}: {regex(pattern)}"]
        return [f"{rule}[lazy]: {regex(f'{pattern}(?:{lead})?{re.escape(self._marker)}')}"]

    def _after(self, *, is_text: bool) -> str:
        after = self._form.after
        return with_special_tokens(after.partition(self._marker)[2] if is_text else after, self._tokens)


def _text_pattern(schema: Mapping[str, Any]) -> str:
    """A regular expression for the strings of a schema."""
    pattern = schema.get("pattern")
    if isinstance(pattern, str):
        begin = "" if pattern.startswith("^") else "(?s:.*)"
        is_closed = pattern.endswith("$") and not pattern.endswith("\\$")
        inner = pattern.removeprefix("^")[: -1 if is_closed else None]
        return f"{begin}(?:{inner}){'' if is_closed else '(?s:.*)'}"
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    if not least and most is None:
        return "(?s:.*)"
    return f"(?s:.{{{least},{'' if most is None else most}}})"


def _json_rule(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': JSON_STYLE})}"


def lark_text(text: str) -> str:
    """A text in Lark's notation."""
    return json.dumps(text, ensure_ascii=False) if text else ""


def with_special_tokens(text: str, tokens: Mapping[str, int]) -> str:
    """A text in Lark's notation, with its special tokens as token ids."""
    if not tokens:
        return lark_text(text)
    pieces = re.split(f"({'|'.join(map(re.escape, tokens))})", text)
    return " ".join(f"<[{tokens[piece]}]>" if piece in tokens else lark_text(piece) for piece in pieces)


def regex(pattern: str) -> str:
    """A regular expression in Lark's notation."""
    # The first replacement is for line breaks that re.escape has marked.
    on_one_line = pattern.replace("\\\n", "\\n").replace("\n", "\\n")
    return f"/{on_one_line.replace('/', chr(92) + '/')}/"
