"""The metrics of a pod for Prometheus: the frontends' counters, the engines' load, and the launcher's own.

The frontends write their counters to files in one folder (the multiprocess mode of prometheus-client): a scrape costs
them nothing, and the counts of a process outlive it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from megatron_runtime.headers import EngineState
from megatron_runtime.launch.pod_state import PodFacts, RankPhase, RegisteredReplicaGroup

ENGINE_STATES = tuple(state.value for state in EngineState if state is not EngineState.RESUMED)

Value = Callable[[RegisteredReplicaGroup], float]

_GAUGES: tuple[tuple[str, str, Value], ...] = (
    ("megatron_requests_running", "Requests in the running batch", lambda group: group.running_requests),
    ("megatron_requests_waiting", "Requests in the queue", lambda group: group.waiting_requests),
    ("megatron_requests_paused", "Requests of a paused or suspended engine", lambda group: group.paused_requests),
    (
        "megatron_kv_usage",
        "Used part of the KV cache, 0 to 1",
        lambda group: group.kv_blocks_used / max(group.kv_blocks_total, 1),
    ),
    ("megatron_weight_version", "Number of weight updates", lambda group: group.weight_version),
)
_COUNTERS: tuple[tuple[str, str, Value], ...] = (
    (
        "megatron_replica_group_prompt_tokens",
        "Prompt tokens of scheduled requests, cached or not",
        lambda group: group.prompt_tokens,
    ),
    ("megatron_replica_group_generation_tokens", "Generated tokens", lambda group: group.generated_tokens),
    ("megatron_draft_tokens", "Tokens drafted by speculation", lambda group: group.draft_tokens),
    (
        "megatron_accepted_draft_tokens",
        "Drafted tokens that were the sampled ones",
        lambda group: group.accepted_draft_tokens,
    ),
)
"""Metrics of a replica group: name, help, and value."""


class PodCollector(Collector):
    """Turns the pod's facts into metrics at the time of the scrape."""

    def __init__(self, read_facts: Callable[[], PodFacts]) -> None:
        self._read_facts = read_facts

    def collect(self) -> Iterator[Metric]:
        """The engines' metrics on the leader, the ranks' on every pod."""
        facts = self._read_facts()
        if facts.is_leader:
            yield from _engine_metrics(facts)
        yield _ranks(facts)
        yield GaugeMetricFamily("megatron_ready", "1 when the pod is ready", value=float(facts.ready))
        yield CounterMetricFamily("megatron_restarts", "Processes that were restarted in place", value=facts.restarts)


def create_exposition(read_facts: Callable[[], PodFacts], frontend_folder: Path | None) -> Callable[[], bytes]:
    """A function that returns the text of ``GET /metrics``."""

    def expose() -> bytes:
        registry = CollectorRegistry()
        registry.register(PodCollector(read_facts))
        if frontend_folder is not None and frontend_folder.is_dir():
            MultiProcessCollector(registry, str(frontend_folder))  # type: ignore[no-untyped-call]
        return generate_latest(registry)

    return expose


def _engine_metrics(facts: PodFacts) -> Iterator[Metric]:
    states = GaugeMetricFamily("megatron_engine_state", "1 for the state of the engines", labels=["state"])
    for state in ENGINE_STATES:
        states.add_metric([state], float(facts.engine_state == state))
    yield states
    yield from _group_metrics(facts)
    yield CounterMetricFamily(
        "megatron_dropped_messages",
        "Malformed, stale or unexpected messages to the coordinator, and connections without the key",
        value=facts.dropped_messages,
    )
    yield GaugeMetricFamily("megatron_replica_groups", "Registered replica groups", value=len(facts.replica_groups))


def _group_metrics(facts: PodFacts) -> Iterator[Metric]:
    for kind, metrics in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
        for name, documentation, value in metrics:
            family = kind(name, documentation, labels=["replica_group"])
            for group in facts.replica_groups:
                family.add_metric([str(group.index)], value(group))
            yield family
    blocks = GaugeMetricFamily("megatron_kv_blocks", "Blocks of the KV cache", labels=["replica_group", "state"])
    for group in facts.replica_groups:
        blocks.add_metric([str(group.index), "used"], group.kv_blocks_used)
        blocks.add_metric([str(group.index), "free"], group.kv_blocks_total - group.kv_blocks_used)
    yield blocks


def _ranks(facts: PodFacts) -> Metric:
    ranks = GaugeMetricFamily("megatron_ranks", "Ranks of this pod, by phase", labels=["phase"])
    for phase in RankPhase:
        ranks.add_metric([phase.value], sum(rank.phase is phase for rank in facts.ranks.values()))
    return ranks
