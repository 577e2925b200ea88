"""Equal requests compute a value once, and no value outlives its requests."""

from __future__ import annotations

import gc

from megatron_runtime.engine.shared_values import SharedValues
from megatron_runtime.engine.stop_matcher import StopMatcher, _automaton


def test_equal_arguments_have_one_value_while_it_is_held() -> None:
    computed = []

    def compute(words: tuple[str, ...], size: int) -> frozenset[str]:
        computed.append(words)
        return frozenset(word[:size] for word in words)

    values = SharedValues(compute)
    first = values(("one", "two"), 2)
    assert values(("one", "two"), 2) is first == {"on", "tw"}
    assert values(("one", "two"), 1) == {"o", "t"}
    assert len(computed) == 2
    del first
    gc.collect()
    assert len(values) == 0
    assert values(("one", "two"), 2) == {"on", "tw"}
    assert len(computed) == 3


def test_the_automaton_of_stop_strings_ends_with_its_requests() -> None:
    """Of 16,384 characters it takes several MiB, and requests with other strings kept 64 of them."""
    gc.collect()
    before = len(_automaton)
    matchers = [StopMatcher(["a stop", "another"]) for _ in range(3)]
    assert len(_automaton) == before + 1
    del matchers
    gc.collect()
    assert len(_automaton) == before
