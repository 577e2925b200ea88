"""Whatever a grammar of required calls admits is parsed as calls that match their schemas."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask
from runtime_support.byte_backend import END, byte_backend

from megatron_runtime.model.tokenizer import Tokenizer
from megatron_runtime.server.bodies.tools import FunctionDefinition, ToolUse
from megatron_runtime.server.messages.message import MessageBuilder
from megatron_runtime.server.messages.message_format import MessageFormat, ResponseParsing
from megatron_runtime.server.messages.reasoning import REASONING_STYLES
from megatron_runtime.server.messages.tool_parsers.formats import TOOL_FORMATS
from megatron_runtime.server.parsers import REASONING_PARSERS

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 6},
        "unit": {"enum": ["K", "C"]},
        "n": {"$ref": "#/$defs/n"},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
        "on": {"type": ["boolean", "null"]},
    },
    "required": ["city", "n"],
    "additionalProperties": False,
    "$defs": {"n": {"type": "integer", "minimum": -5, "maximum": 20}},
}
FUNCTIONS = (FunctionDefinition(name="w", parameters=PARAMETERS), FunctionDefinition(name="now-or.later"))
SCHEMAS = {"w": PARAMETERS, "now-or.later": {"type": "object", "maxProperties": 0}}


def generated(known: Tokenizer, grammar: str, random: Random) -> str:
    """A random answer that the grammar admits, with its special tokens; ends are preferred, so that it is short."""
    vocabulary = LLTokenizer(known.definition, eos_token=END)
    matcher = LLMatcher(vocabulary, grammar)
    mask = allocate_token_bitmask(1, vocabulary.vocab_size)
    tokens: list[int] = []
    while True:
        fill_next_token_bitmask(matcher, mask)
        allowed = np.flatnonzero(np.unpackbits(mask[0].view(np.uint8), bitorder="little"))
        preferred = [token for token in allowed if token >= END or chr(token) in '<]}"\n']
        token = int(random.choice(preferred if preferred and random.random() < 0.4 else list(allowed)))
        if token == END:
            return known.detokenize(tokens, skip_special_tokens=False)
        assert matcher.consume_token(token)
        tokens.append(token)
        assert len(tokens) < 20_000


def answer(parsing: ResponseParsing, text: str, *, is_cut: bool = False) -> dict[str, Any]:
    body, parser = MessageBuilder(parsing), parsing.new_parser()
    for char in text:
        body.add(parser.push(char))
    body.add(parser.finish(is_cut=is_cut))
    return body.body()


@pytest.mark.parametrize(
    ("name", "has_special_tokens"),
    # Random text has no end of a message in it, which Harmony's thoughts would need without special tokens.
    [(name, is_special) for name in TOOL_FORMATS for is_special in (True, False) if is_special or name != "openai"],
)
def test_required_calls_match_their_schemas_after_any_thoughts(name: str, has_special_tokens: bool) -> None:
    style = REASONING_STYLES[name] if name in REASONING_PARSERS else None
    marks = (*TOOL_FORMATS[name].markers, *(style.markers if style else ()))
    known = Tokenizer(byte_backend(list(dict.fromkeys(marks)) if has_special_tokens else []), location="here", eod=END)
    # Without special tokens, the thoughts have ended in the prompt, because random text has no end of them in it.
    prompt = [] if has_special_tokens or style is None else known.tokenize(style.ends[0])
    parsing = MessageFormat(known, [name]).parsing(ToolUse(FUNCTIONS, "required"), prompt)
    assert bool(parsing.tokens) is has_special_tokens
    grammar = parsing.grammar(None)
    assert grammar is not None
    names = set()
    for seed in range(8):
        text = generated(known, grammar, Random(seed))
        message = answer(parsing, text)
        assert message["content"] is None or name == "openai", text  # which may say something before a call
        assert message["tool_calls"], text
        for call in message["tool_calls"]:
            names.add(call["function"]["name"])
            jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMAS[call["function"]["name"]])
    assert names == set(SCHEMAS)


@pytest.mark.parametrize("name", [name for name in TOOL_FORMATS if name != "openai"])
def test_a_required_call_that_is_cut_off_anywhere_leaves_no_content(name: str) -> None:
    known = Tokenizer(byte_backend(), location="here", eod=END)
    parsing = MessageFormat(known, [name]).parsing(ToolUse(FUNCTIONS, "required"), known.tokenize("</think>"))
    grammar = parsing.grammar(None)
    assert grammar is not None
    text = generated(known, grammar, Random(0))
    for end in range(min(len(text), 200)):
        assert not answer(parsing, text[:end], is_cut=True)["content"], text[:end]


TEXT = {"type": "string", "maxLength": 3}
JOINED: list[dict[str, Any]] = [
    {"properties": {"city": TEXT, "unit": TEXT}, "anyOf": [{"required": ["city"]}, {"required": ["unit"]}]},
    {"properties": {"city": TEXT, "of": {"allOf": [{"$ref": "#/$defs/U"}, {"description": "d"}]}}, "required": ["of"]},
    {"allOf": [{"properties": {"city": TEXT}}, {"properties": {"unit": TEXT}, "required": ["unit"]}]},
]


@pytest.mark.parametrize("schema", JOINED)
def test_no_arguments_are_invented_where_schemas_apply_together(schema: dict[str, Any]) -> None:
    unit = {"type": "object", "properties": {"unit": TEXT}}
    function = FunctionDefinition(name="w", parameters={"type": "object", **schema, "$defs": {"U": unit}})
    known = Tokenizer(byte_backend(), location="here", eod=END)
    parsing = MessageFormat(known, ["hermes"]).parsing(ToolUse((function,), "required"), [])
    grammar = parsing.grammar(None)
    assert grammar is not None
    for seed in range(20):
        for call in answer(parsing, generated(known, grammar, Random(seed)))["tool_calls"]:
            arguments = json.loads(call["function"]["arguments"])
            jsonschema.validate(arguments, function.parameters)
            assert arguments.keys() <= {"city", "unit", "of"}
            assert arguments.get("of", {}).keys() <= {"unit"}
