"""The view for logs and pipes: one line per change."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console

from megatron_operator.local.snapshot import Snapshot, pod_state
from megatron_operator.observed_state import Loading

LOADING_STEPS = 4
"""Progress of loading is printed at every quarter."""


class PlainView:
    """Prints the differences between snapshots."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last: dict[str, str] = {}

    def show(self, snapshot: Snapshot) -> None:
        """Print the facts that are new or changed."""
        facts = dict(_facts(snapshot))
        for subject, words in facts.items():
            if self._last.get(subject) != words:
                self.say(f"{subject}: {words}")
        for gone in self._last.keys() - facts.keys():
            if gone.startswith("pod "):
                self.say(f"{gone}: gone")
        self._last = facts

    def say(self, text: str) -> None:
        """Print one line without wrapping or markup."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Nothing to close."""


def _facts(snapshot: Snapshot) -> Iterator[tuple[str, str]]:
    status, desired = snapshot.status, snapshot.resource.spec.replicas
    yield "phase", str(status.phase)
    if status.engine_state:
        yield "engine", status.engine_state
    yield "ready replicas", f"{status.ready_replicas}/{desired}"
    for condition in status.conditions:
        if condition.status != "False" or condition.type == "Ready":
            words = f": {condition.message}" if condition.type == "Failed" else ""
            yield f"condition {condition.type}", f"{condition.status} ({condition.reason}){words}"
    for pod in snapshot.pods:
        yield f"pod {pod.name}", f"{pod_state(pod)} at {pod.address}{_loaded(pod.loading)}"
    for number, problem in enumerate(snapshot.problems):
        yield f"refused {number + 1}", problem


def _loaded(loading: Loading | None) -> str:
    if loading is None or loading.loaded_bytes >= loading.total_bytes:
        return ""
    quarter = loading.loaded_bytes * LOADING_STEPS // loading.total_bytes
    return f", {quarter * 100 // LOADING_STEPS} % of the weights read"
