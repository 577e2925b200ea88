"""The diagram in docs/lifecycle.md has the edges of the runtime and the operator."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path

from megatron_operator.api.v1alpha1 import Lifecycle
from megatron_operator.lifecycle import SETTLED_STATE, next_signal
from megatron_operator.observed_state import EngineState
from megatron_runtime.headers import Headers
from megatron_runtime.lifecycle import EDGES

PAGE = Path(__file__).parents[2] / "docs" / "lifecycle.md"
Edge = tuple[str, str, str]


def drawn() -> set[Edge]:
    """Source, target and signal of each edge, without those that begin or end outside of the states."""
    (diagram,) = re.findall(r"```mermaid\n(.*?)```", PAGE.read_text(), re.S)
    return set(re.findall(r"^ *([A-Z]+) --> ([A-Z]+): (\w+)$", diagram, re.M))


def test_the_diagram_has_the_edges_that_the_runtime_allows() -> None:
    allowed = {
        (state.name, reached.name, signal.name.lower())
        for state, edges in EDGES.items()
        for signal, reached in edges.items()
        if signal is not Headers.STOP
    }
    assert drawn() == allowed


def test_the_operator_reaches_every_desired_state_along_edges_of_the_diagram() -> None:
    reached = {(state, signal): to for state, to, signal in drawn()}
    for lifecycle, begin in product(SETTLED_STATE, SETTLED_STATE.values()):
        state, steps = begin, 0
        while (signal := next_signal(lifecycle, state)) is not None:
            state, steps = EngineState(reached[state.value, signal.value]), steps + 1
            assert steps <= len(SETTLED_STATE)
        assert state is SETTLED_STATE[lifecycle]


def test_the_page_describes_every_lifecycle() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", PAGE.read_text(), re.M)
    assert rows == [lifecycle.value for lifecycle in Lifecycle]
