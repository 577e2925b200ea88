"""The memory of compiled grammars that are kept for later requests."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from runtime_support.grammars import follow
from runtime_support.resident_memory import resident_bytes

from megatron_runtime.config import InferenceConfig
from megatron_runtime.engine.dynamic_engine import DynamicInferenceEngine
from megatron_runtime.engine.sampling.compiled_grammars import BYTES_PER_CHARACTER, CompiledGrammars, compiled_grammars
from megatron_runtime.errors import ConfigurationError
from megatron_runtime.guides import choice_grammar, json_schema_grammar, regex_grammar
from megatron_runtime.model.tokenizer import Tokenizer
from megatron_runtime.processes.allocator import return_freed_memory

MIB = 2**20
IDLE = 0.2


def large_grammar(number: int) -> str:
    """About 4 MiB when it is compiled."""
    names = (f"field_{index}_of_{number}" for index in range(900))
    return json_schema_grammar({"type": "object", "properties": {name: {"type": "string"} for name in names}})


def memory() -> int:
    return_freed_memory()
    return resident_bytes()


def test_the_memory_of_many_large_grammars_has_a_limit_and_returns_when_none_is_used(byte_tokenizer: Tokenizer) -> None:
    grammars = CompiledGrammars(byte_tokenizer, idle_seconds=IDLE)
    grammars.max_bytes = 48 * MIB
    grammars.check(regex_grammar("a"))
    before = memory()
    for number in range(20):
        grammars.check(large_grammar(number))
    assert 8 * MIB < grammars.num_bytes <= grammars.max_bytes
    assert memory() - before < 24 * MIB  # all of them take 60 MiB
    while grammars.num_bytes:
        time.sleep(IDLE / 10)
    time.sleep(IDLE)
    assert memory() - before < 4 * MIB


@pytest.mark.parametrize(
    "grammar",
    [
        json_schema_grammar({"type": "object", "properties": {f"f{n}": {"maxLength": 50} for n in range(900)}}),
        choice_grammar([f"text {number}" for number in range(4096)]),
        regex_grammar("(?u)" + r"[^\w]" * 500),
    ],
    ids=["schema", "choices", "classes"],
)
def test_a_grammar_takes_no_more_than_its_text_suggests_after_its_use(byte_tokenizer: Tokenizer, grammar: str) -> None:
    grammars = CompiledGrammars(byte_tokenizer)
    grammars.check(regex_grammar("a"))
    before = memory()
    matcher = grammars.matcher(grammar)
    follow(matcher, 100)
    del matcher
    assert memory() - before <= BYTES_PER_CHARACTER * len(grammar) + 2 * MIB


def test_the_last_grammar_is_kept_whatever_its_size_and_a_used_one_longer_than_others(
    byte_tokenizer: Tokenizer,
) -> None:
    grammars = CompiledGrammars(byte_tokenizer)
    first, second, third = (regex_grammar(f"{letter}{{9}}") for letter in "abc")

    def compile_and_release(grammar: str) -> Any:
        compiled = grammars.compile(grammar)
        compiled.result()
        grammars.release(grammar)
        return compiled

    grammars.max_bytes = 1
    kept = compile_and_release(first)
    assert compile_and_release(first) is kept
    grammars.max_bytes = 2 * BYTES_PER_CHARACTER * len(first)
    compile_and_release(second)
    assert compile_and_release(first) is kept
    compile_and_release(third)
    assert list(grammars._known) == [first, third]


def test_the_limit_is_that_of_the_engine(make_engine: Callable[..., DynamicInferenceEngine]) -> None:
    assert compiled_grammars(make_engine(grammar_cache_bytes=9 * MIB).tokenizer).max_bytes == 9 * MIB
    with pytest.raises(ConfigurationError, match="grammar_cache_bytes"):
        InferenceConfig(grammar_cache_bytes=0)
