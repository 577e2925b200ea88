"""What Prometheus reads from a pod: the frontends' counters, the engines' load, and the launcher's own.

The frontends write their counters to files in one folder (the multiprocess mode of prometheus-client), so that a scrape
costs them nothing and what a dead frontend counted is not lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from megatron_runtime.headers import EngineState
from megatron_runtime.launch.pod_state import PodFacts, RankPhase

ENGINE_STATES = tuple(state.value for state in EngineState if state is not EngineState.RESUMED)


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
    states = GaugeMetricFamily("megatron_engine_state", "1 for the state the engines are in", labels=["state"])
    for state in ENGINE_STATES:
        states.add_metric([state], float(facts.engine_state == state))
    yield states
    running = GaugeMetricFamily("megatron_requests_running", "Requests that generate tokens", labels=["group"])
    waiting = GaugeMetricFamily("megatron_requests_waiting", "Requests that wait for their turn", labels=["group"])
    paused = GaugeMetricFamily(
        "megatron_requests_paused", "Requests that stand still in a paused or suspended engine", labels=["group"]
    )
    usage = GaugeMetricFamily("megatron_kv_usage", "Used part of the KV cache, 0 to 1", labels=["group"])
    prompts = CounterMetricFamily(
        "megatron_replica_prompt_tokens", "Tokens of prompts taken up, cached or not", labels=["group"]
    )
    generated = CounterMetricFamily("megatron_replica_generation_tokens", "Tokens generated", labels=["group"])
    blocks = GaugeMetricFamily("megatron_kv_blocks", "Blocks of the KV cache", labels=["group", "state"])
    weights = GaugeMetricFamily("megatron_weight_version", "How often the weights were updated", labels=["group"])
    for replica in facts.replicas:
        group = str(replica.group)
        running.add_metric([group], replica.running_requests)
        waiting.add_metric([group], replica.waiting_requests)
        blocks.add_metric([group, "used"], replica.kv_blocks_used)
        blocks.add_metric([group, "free"], replica.kv_blocks_total - replica.kv_blocks_used)
        weights.add_metric([group], replica.weight_version)
        paused.add_metric([group], replica.paused_requests)
        usage.add_metric([group], replica.kv_blocks_used / max(replica.kv_blocks_total, 1))
        prompts.add_metric([group], replica.prompt_tokens)
        generated.add_metric([group], replica.generated_tokens)
    yield from (running, waiting, paused, blocks, usage, weights, prompts, generated)
    yield CounterMetricFamily(
        "megatron_dropped_messages",
        "Messages to the coordinator that were malformed, stale or from strangers, and connections without the key",
        value=facts.dropped_messages,
    )
    yield GaugeMetricFamily("megatron_replicas", "Replicas that are registered", value=len(facts.replicas))


def _ranks(facts: PodFacts) -> Metric:
    ranks = GaugeMetricFamily("megatron_ranks", "Ranks of this pod by phase", labels=["phase"])
    for phase in RankPhase:
        ranks.add_metric([phase.value], sum(rank.phase is phase for rank in facts.ranks.values()))
    return ranks
