"""Generates the metrics reference ``docs/metrics.md`` from the metrics that the operator and the runtime export.

``python tools/metrics_reference.py`` writes it, from the repository's root; ``--check`` only checks that it is up to
date. Names, types, labels and meanings come from the code; the queries and vLLM's names are defined here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from generated_page import write_or_check
from prometheus_client.core import Metric
from prometheus_client.metrics import MetricWrapperBase

from megatron_operator.activator.meters import ActivatorMeters
from megatron_operator.api.v1alpha1 import Condition, ConditionType, MegatronInferenceStatus, Phase
from megatron_operator.kubernetes.fleet_rollout import FleetRollout
from megatron_operator.metrics import Meters
from megatron_runtime.launch.metrics import PodCollector
from megatron_runtime.launch.pod_state import PodFacts, RankState, RegisteredReplicaGroup
from megatron_runtime.server.metrics import FrontendMetrics

PAGE = Path("docs/metrics.md")
WAITING_REASONS = ("SchedulingGated", "Unschedulable", "GangTimeout")
"""Reasons of the condition Ready by which queries distinguish resources that wait for nodes."""
ANY = "500"
"""Placeholder for the values of labels that depend on requests, such as a status."""
UNITS = {
    "seconds": "seconds",
    "tokens": "tokens",
    "usage": "0 to 1",
    "blocks": "blocks",
    "bytes": "bytes",
    "ready": "0 or 1",
    "leading": "0 or 1",
    "state": "0 or 1",
    "phase": "0 or 1",
}
"""Units by the last word of the name; the unit of all others is count."""
BY_MODEL = "sum by (namespace, megatroninference)"
"""Sum per resource; the chart's PodMonitor adds its name as the label ``megatroninference``."""

HEADER = """<!-- Generated from the code and tools/metrics_reference.py by `make crd`. Do not edit. -->

# Metrics

The operator serves metrics at `/metrics` on port 8080, each pod of a model and each activator on port 9001. The Helm
chart has monitors for them, alerts and a dashboard (`metrics.serviceMonitor`, `metrics.podMonitor`,
`metrics.prometheusRule`, `metrics.dashboard`), see [install](install.md). The monitor of models adds the label
`megatroninference`, the name of the resource, which is also the pod's label `inference.megatron.dev/name`. The metrics
of operator and activators about single resources have the labels `namespace` and `megatroninference` of the resource; a
scrape configuration of your own needs `honor_labels`.

The names are those of the series; a histogram has the series `_bucket`, `_sum` and `_count`. Counters reset when their
process restarts, which `rate` and `increase` account for. Each metric has a question that it answers, with the PromQL
query. If vLLM has a metric with the same meaning, the last column has its name, to port dashboards and autoscalers;
labels other than `le` differ.
"""


@dataclass(frozen=True)
class Question:
    """A question that a metric answers, with its PromQL query, and vLLM's metric with the same meaning."""

    words: str
    query: str
    vllm: str = ""


def _part_of(name: str, quantile: float = 0.95) -> str:
    """A quantile of a histogram, per resource."""
    return f"histogram_quantile({quantile}, sum by (namespace, megatroninference, le) (rate({name}_bucket[5m])))"


def _slow(words: str, name: str, vllm: str) -> Question:
    return Question(words, _part_of(name), vllm)


QUESTIONS = {
    "megatron_operator_reconciles_total": Question(
        "What fraction of the rounds fails?",
        'sum(rate(megatron_operator_reconciles_total{outcome!="success"}[10m]))'
        " / sum(rate(megatron_operator_reconciles_total[10m]))",
    ),
    "megatron_operator_reconcile_duration_seconds": Question(
        "How long does a round take?",
        "histogram_quantile(0.95, sum by (le) (rate(megatron_operator_reconcile_duration_seconds_bucket[5m])))",
    ),
    "megatron_operator_resources": Question(
        "How many models have problems?", 'sum(megatron_operator_resources{phase=~"Failed|Degraded"})'
    ),
    "megatron_operator_resource_phase": Question(
        "Which models have problems?",
        'sum by (namespace, megatroninference, reason) (megatron_operator_resource_phase{phase=~"Failed|Degraded"})',
    ),
    "megatron_operator_fleet_rollout_resources": Question(
        "Which share of the models has the new default image?",
        'sum(megatron_operator_fleet_rollout_resources{state="current"})'
        " / sum(megatron_operator_fleet_rollout_resources)",
    ),
    "megatron_operator_leading": Question("Is any operator active?", "max(megatron_operator_leading) == 1"),
    "megatron_activator_requests_total": Question(
        "What fraction of the requests through activators fails?",
        'sum by (namespace, megatroninference) (rate(megatron_activator_requests_total{status=~"5.."}[5m]))'
        " / sum by (namespace, megatroninference) (rate(megatron_activator_requests_total[5m]))",
    ),
    "megatron_activator_waiting_requests": Question(
        "Which models do requests wait for?", f"{BY_MODEL} (megatron_activator_waiting_requests) > 0"
    ),
    "megatron_activator_wait_seconds": Question(
        "How long do requests wait for a model to start?",
        "histogram_quantile(0.95, sum by (le) (rate(megatron_activator_wait_seconds_bucket[1h])))",
    ),
    "megatron_activator_starts_total": Question(
        "Which models stop and start too often?", f"{BY_MODEL} (increase(megatron_activator_starts_total[1d])) > 10"
    ),
    "megatron_activator_body_bytes": Question(
        "Which activators are near their limit of held bodies?", "megatron_activator_body_bytes > 2e8"
    ),
    "megatron_engine_state": Question("Which models are suspended?", 'megatron_engine_state{state="SUSPENDED"} == 1'),
    "megatron_requests_running": Question(
        "How busy is it?", f"{BY_MODEL} (megatron_requests_running)", "vllm:num_requests_running"
    ),
    "megatron_requests_waiting": Question(
        "Are there too few replica groups?", f"{BY_MODEL} (megatron_requests_waiting) > 0", "vllm:num_requests_waiting"
    ),
    "megatron_requests_paused": Question(
        "Which requests wait for an unpause?", f"{BY_MODEL} (megatron_requests_paused) > 0"
    ),
    "megatron_kv_blocks": Question(
        "How much of the KV cache is free?", f'{BY_MODEL} (megatron_kv_blocks{{state="free"}})'
    ),
    "megatron_kv_usage": Question(
        "Which cache is nearly full?", "megatron_kv_usage > 0.95", "vllm:kv_cache_usage_perc"
    ),
    "megatron_weight_version": Question(
        "Do replica groups have different weights?",
        "max by (namespace, megatroninference) (megatron_weight_version)"
        " != min by (namespace, megatroninference) (megatron_weight_version)",
    ),
    "megatron_replica_group_prompt_tokens_total": Question(
        "Is the load spread evenly?", "sum by (replica_group) (rate(megatron_replica_group_prompt_tokens_total[5m]))"
    ),
    "megatron_replica_group_generation_tokens_total": Question(
        "How fast is each replica group?",
        "sum by (replica_group) (rate(megatron_replica_group_generation_tokens_total[5m]))",
    ),
    "megatron_draft_tokens_total": Question(
        "How many tokens does speculation draft per second?", f"{BY_MODEL} (rate(megatron_draft_tokens_total[5m]))"
    ),
    "megatron_accepted_draft_tokens_total": Question(
        "What fraction of the drafts is right?",
        f"{BY_MODEL} (rate(megatron_accepted_draft_tokens_total[5m]))"
        f" / {BY_MODEL} (rate(megatron_draft_tokens_total[5m]))",
    ),
    "megatron_dropped_messages_total": Question(
        "Does an unauthorized peer connect?", "increase(megatron_dropped_messages_total[1h]) > 0"
    ),
    "megatron_replica_groups": Question("How many replica groups serve?", f"{BY_MODEL} (megatron_replica_groups)"),
    "megatron_ranks": Question(
        "Which pods still load?", 'megatron_ranks{phase=~"Starting|Loading|Rendezvous|Registering"} > 0'
    ),
    "megatron_ready": Question("Which pods are not ready?", "megatron_ready == 0"),
    "megatron_restarts_total": Question("Do processes fail repeatedly?", "increase(megatron_restarts_total[30m]) > 0"),
    "megatron_requests_total": Question(
        "What fraction of the requests fails?",
        f'{BY_MODEL} (rate(megatron_requests_total{{status=~"5.."}}[5m]))'
        f" / {BY_MODEL} (rate(megatron_requests_total[5m]))",
        "http_requests_total",
    ),
    "megatron_prompt_tokens_total": Question(
        "How many prompt tokens are processed per second?",
        f"{BY_MODEL} (rate(megatron_prompt_tokens_total[5m]))",
        "vllm:prompt_tokens_total",
    ),
    "megatron_cached_prompt_tokens_total": Question(
        "What fraction of the prompt tokens does the prefix cache provide?",
        f"{BY_MODEL} (rate(megatron_cached_prompt_tokens_total[5m]))"
        f" / {BY_MODEL} (rate(megatron_prompt_tokens_total[5m]))",
        "vllm:prefix_cache_hits_total",
    ),
    "megatron_generation_tokens_total": Question(
        "How many tokens are generated per second?",
        f"{BY_MODEL} (rate(megatron_generation_tokens_total[5m]))",
        "vllm:generation_tokens_total",
    ),
    "megatron_time_to_first_token_seconds": _slow(
        "How long until an answer begins?", "megatron_time_to_first_token_seconds", "vllm:time_to_first_token_seconds"
    ),
    "megatron_time_per_output_token_seconds": _slow(
        "How long does each token take?",
        "megatron_time_per_output_token_seconds",
        "vllm:request_time_per_output_token_seconds",
    ),
    "megatron_request_duration_seconds": _slow(
        "How long does an answer take?", "megatron_request_duration_seconds", "vllm:e2e_request_latency_seconds"
    ),
    "megatron_queue_time_seconds": _slow(
        "How long do requests queue?", "megatron_queue_time_seconds", "vllm:request_queue_time_seconds"
    ),
    "megatron_request_prompt_tokens": _slow(
        "How long are prompts?", "megatron_request_prompt_tokens", "vllm:request_prompt_tokens"
    ),
    "megatron_request_generation_tokens": _slow(
        "How long are answers?", "megatron_request_generation_tokens", "vllm:request_generation_tokens"
    ),
    "megatron_finished_answers_total": Question(
        "Why do answers end?",
        "sum by (namespace, megatroninference, reason) (rate(megatron_finished_answers_total[5m]))",
        "vllm:request_success_total",
    ),
}
"""By the name of the series; a metric without a question fails the check."""


def of_the_operator() -> Iterable[Metric]:
    """The metrics of the operator."""
    meters = Meters()
    FleetRollout(1, meters, wake=lambda _key: None)
    for number, (phase, reason) in enumerate(product(Phase, ("", *WAITING_REASONS))):
        ready = Condition(type=ConditionType.READY, status="False", reason=reason, last_transition_time="")
        meters.report(ANY, f"{ANY}-{number}", MegatronInferenceStatus(phase=phase, conditions=[ready]))
    return meters.registry.collect()


def of_an_activator() -> Iterable[Metric]:
    """The metrics of an activator."""
    meters = ActivatorMeters()
    meters.answered(ANY, ANY, ANY)
    meters.started(ANY, ANY)
    with meters.waiting(ANY, ANY):
        return list(meters.registry.collect())


def of_a_pod(*, is_leader: bool = True) -> Iterable[Metric]:
    """The metrics of a launcher; that of the leader pod also exports the engines' metrics."""
    groups = (RegisteredReplicaGroup(index=0, state="RUNNING"),)
    facts = PodFacts(is_leader=is_leader, engine_state="RUNNING", replica_groups=groups, ranks={0: RankState(0)})
    return PodCollector(lambda: facts).collect()


def of_a_frontend() -> Iterator[Metric]:
    """The metrics of a frontend process; the launcher of a pod sums up those of its frontends."""
    for metric in vars(FrontendMetrics()).values():
        assert isinstance(metric, MetricWrapperBase)
        if metric._labelnames:
            metric.labels(*(ANY for _ in metric._labelnames))
        yield from metric.collect()


def series_name(metric: Metric) -> str:
    """The name of the metric's series in Prometheus."""
    return f"{metric.name}_total" if metric.type == "counter" else metric.name


def reference_text() -> str:
    """The text of the page. Raises KeyError for a metric without a question."""
    of_every_pod = {metric.name for metric in of_a_pod(is_leader=False)}
    pods = list(of_a_pod())
    parts = {
        "The operator": of_the_operator(),
        "Activators": of_an_activator(),
        "Every pod": [metric for metric in pods if metric.name in of_every_pod],
        "The engines, at the leader pod": [metric for metric in pods if metric.name not in of_every_pod],
        "The frontends, at the leader pod": of_a_frontend(),
    }
    return HEADER + "".join(_section(title, metrics) for title, metrics in parts.items())


def _section(title: str, metrics: Iterable[Metric]) -> str:
    head = "| name | type, unit | labels | meaning | question and query | vLLM |\n|---|---|---|---|---|---|\n"
    rows = "".join(f"| {' | '.join(_cells(metric))} |\n" for metric in metrics)
    return f"\n## {title}\n\n{head}{rows}"


def _cells(metric: Metric) -> tuple[str, ...]:
    name = series_name(metric)
    question = QUESTIONS[name]
    # A bar would end the cell; Markdown removes the backslash, in code too.
    query = question.query.replace("|", "\\|")
    return (
        f"`{name}`",
        f"{metric.type}, {UNITS.get(metric.name.rpartition('_')[2], 'count')}",
        ", ".join(_labels(metric)),
        metric.documentation,
        f"{question.words} `{query}`",
        f"`{question.vllm}`" if question.vllm else "",
    )


def _labels(metric: Metric) -> Iterator[str]:
    """Each label, with its values if the code defines them all."""
    seen: dict[str, list[str]] = {}
    for sample in metric.samples:
        for label, value in sample.labels.items():
            seen.setdefault(label, []).append(value)
    for label, values in seen.items():
        if label == "le":
            continue
        listed = list(dict.fromkeys(values))
        named = all(re.fullmatch("[A-Za-z]+", value) for value in listed)
        yield f"`{label}`" + (f": {', '.join(listed)}" if named else "")


if __name__ == "__main__":
    write_or_check(PAGE, reference_text, __doc__)
