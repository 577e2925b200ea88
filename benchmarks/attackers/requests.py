"""Requests that cost a server far more than an ordinary one, unless it bounds their cost."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

COMPLETIONS, CHAT, TOKENIZE = "/v1/completions", "/v1/chat/completions", "/tokenize"
MIB = 1 << 20
TURN = [{"role": "user", "content": "Hello"}]


@dataclass(frozen=True)
class Attack:
    """``body`` makes the request's body, which each connection sends again and again.

    With ``is_endless`` each connection sends a head without an end instead, which begins with ``body``. With
    ``to_control`` the control API gets it, without a token.
    """

    name: str
    path: str
    body: Callable[[], bytes]
    is_endless: bool = False
    to_control: bool = False


def _completion(name: str, **fields: Any) -> Attack:
    return Attack(name, COMPLETIONS, lambda: _json(prompt=fields.pop("prompt", "Hello"), **fields))


def _chat(name: str, **fields: Any) -> Attack:
    return Attack(name, CHAT, lambda: _json(messages=fields.pop("messages", TURN), **fields))


def _json(**fields: Any) -> bytes:
    return json.dumps({"model": "model", "max_tokens": 8, **fields}).encode()


def _tools(number: int) -> list[dict[str, Any]]:
    fields = {f"field_{index}": {"type": "string"} for index in range(8)}
    schema = {"type": "object", "properties": fields}
    return [{"type": "function", "function": {"name": f"tool_{n}", "parameters": schema}} for n in range(number)]


def _wide(number: int) -> dict[str, Any]:
    fields = {f"field_{index}_of_@number": {"type": "string", "maxLength": 50} for index in range(number)}
    return {"type": "json_schema", "json_schema": {"name": "wide", "schema": {"type": "object", "properties": fields}}}


def _stops(number: int, length: int) -> list[str]:
    return [f"{index:0{length}d}" for index in range(number)]


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-Long: "


def attacks() -> tuple[Attack, ...]:
    """All attacks, in the order of the output."""
    return (
        _completion("prompt of 15 MiB", prompt="word " * (3 * MIB)),
        Attack("text of 15 MiB to tokenize", TOKENIZE, lambda: _json(prompt="word " * (3 * MIB))),
        _completion("prompt without spaces, 15 MiB", prompt="a" * (15 * MIB)),
        _completion("5 million token ids", prompt=[7] * 5_000_000),
        _completion("300,000 empty objects as prompts", prompt=[{}] * 300_000),
        Attack("16 MiB that are not JSON", COMPLETIONS, lambda: b'{"prompt": "' + b"x" * (16 * MIB - 20)),
        Attack("100,000 nested lists", COMPLETIONS, lambda: b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
        _completion("400 KB with n=128", prompt="word " * 80_000, n=128),
        _completion("n=128", n=128),
        _completion("50,000 stop strings with n=128", stop=_stops(50_000, 8), n=128),
        _completion("256 stop strings with n=16", stop=_stops(256, 60), n=16),
        _completion("1.6 MB of stop strings", stop=_stops(16, 100_000)),
        _completion("60,000 biases with n=128", logit_bias={str(index): 1 for index in range(60_000)}, n=128),
        _completion("1024 biases with n=16", logit_bias={str(index): 1 for index in range(1024)}, n=16),
        _completion("1024 biases with n=128", logit_bias={str(index): 1 for index in range(1024)}, n=128),
        _completion("1 MB of bad words with n=60", bad_words=_stops(1000, 1020), n=60),
        _completion("16,000 characters of bad words with n=128", bad_words=_stops(500, 32), n=128),
        _completion("65,536 allowed tokens with n=64", allowed_token_ids=list(range(256)) * 256, n=64),
        _completion("8,192 allowed tokens with n=128", allowed_token_ids=list(range(256)) * 32, n=128),
        _chat("4,000 messages", messages=[{"role": "user", "content": "word " * 20}] * 4_000),
        _chat("50,000 tools", tools=_tools(50_000)),
        _chat("512 tools", tools=_tools(512)),
        _chat("schemas of 900 properties, all different", response_format=_wide(900)),
        _chat("schema of 20,000 properties", response_format=_wide(20_000)),
        _completion("expression that repeats", guided_regex="((a{1,99}b{1,99}){1,99}c){1,99}"),
        _completion("expression of 512 Unicode classes", guided_regex="(?u)" + r"[^\w]" * 512),
        _completion("grammar of 32,000 Unicode classes", guided_grammar="start: /" + r"\w" * 32_000 + "/"),
        _completion("multiples of 9,973", guided_json={"type": "integer", "multipleOf": 9_973}),
        _completion("multiples of 999,983", guided_json={"type": "integer", "multipleOf": 999_983}),
        _completion("texts whose states are all different", guided_regex="[a-z ]*e[a-z ]{30}x", max_tokens=60),
        _completion("user of 15 MiB", user="word " * (3 * MIB)),
        _completion("metadata of 15 MiB", metadata={"words": "word " * (3 * MIB)}),
        Attack("header without an end", COMPLETIONS, lambda: HEAD, is_endless=True),
        Attack("header without an end, control API", "/v1/pause", lambda: HEAD, is_endless=True, to_control=True),
        Attack("body of 70 MiB, control API", "/v1/pause", lambda: b'"' + b"x" * (70 * MIB), to_control=True),
    )
