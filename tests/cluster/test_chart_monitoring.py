"""Monitors, alerts and dashboard use existing metrics and valid PromQL."""

import json
import re
from collections.abc import Iterator
from typing import Any

import promql_parser
import pytest
from chart_support.exported import BY_SCRAPING, BY_THE_POD_MONITOR, exported
from chart_support.helm import CHART, Helm, Object, of_kind, only
from chart_support.values import MONITORED
from metrics_reference import (
    PAGE,
    QUESTIONS,
    of_a_frontend,
    of_a_pod,
    of_an_activator,
    of_the_operator,
    reference_text,
    series_name,
)
from operator_support.fixtures import ROOT
from operator_support.resource import manifest
from promql_parser import AggregateExpr, Matcher, MatchOp, VectorSelector
from suite_support import yaml_documents

from megatron_operator.api.parse import parse_resource
from megatron_operator.names import PodIdentity
from megatron_operator.render import render_pod
from megatron_operator.settings import Settings

SERIES = exported()
GRAFANAS_OWN = {"$__rate_interval": "5m"}
FOR_ALL = ("$namespace", "$resource")
"""Variables of the dashboard, which match any value."""

RULES: list[Object] = [
    rule for group in yaml_documents.load((CHART / "files" / "alerts.yaml").read_text()) for rule in group["rules"]
]
DASHBOARD: Object = json.loads((CHART / "files" / "dashboard.json").read_text())
PANELS: list[Object] = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def parsed(query: str) -> Any:
    """The parsed query. Raises ValueError for invalid PromQL."""
    for name, value in GRAFANAS_OWN.items():
        query = query.replace(name, value)
    return promql_parser.parse(query)


def parts(query: str) -> list[Any]:
    """All expressions in the query."""
    found: list[Any] = []
    promql_parser.walk(parsed(query), pre_visit=lambda each: found.append(each) or True)
    return found


def impossible(query: str) -> Iterator[str]:
    """Series, labels and values in the query that are not exported."""
    known = {*BY_SCRAPING, BY_THE_POD_MONITOR, "le"}
    everything = parts(query)
    for part in everything:
        if isinstance(part, VectorSelector):
            names = series_of(part)
            if not names:
                yield str(part.name)
            for name in names:
                known |= SERIES[name].labels.keys()
                matchers = (each for each in part.matchers.matchers if each.name != "__name__")
                yield from (f"{name}: {each}" for each in matchers if not can_match(name, each))
    for part in everything:
        if isinstance(part, AggregateExpr) and part.modifier is not None:
            yield from set(part.modifier.labels) - known


def series_of(part: Any) -> list[str]:
    """The exported series that the selector names, itself or by a pattern."""
    if part.name is not None:
        return [part.name] if part.name in SERIES else []
    (pattern,) = (each.value for each in part.matchers.matchers if each.name == "__name__")
    return [name for name in SERIES if re.fullmatch(pattern, name)]


def can_match(name: str, matcher: Matcher) -> bool:
    if matcher.value in FOR_ALL:
        return True
    as_regex = matcher.op in (MatchOp.Re, MatchOp.NotRe)
    return SERIES[name].has(matcher.name, matcher.value, as_regex=as_regex)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_alerts_use_exported_metrics(rule: Object) -> None:
    assert list(impossible(rule["expr"])) == []


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_alert_texts_use_existing_labels(rule: Object) -> None:
    assert rule["labels"]["severity"] in ("critical", "warning")
    words = " ".join(rule["annotations"][field] for field in ("summary", "description"))
    sums = [part for part in parts(rule["expr"]) if isinstance(part, AggregateExpr)]
    kept = [set(part.modifier.labels) for part in sums if part.modifier is not None]
    assert all(set(re.findall(r"\$labels\.(\w+)", words)) <= labels for labels in kept or [set()])


def test_alert_names_are_unique() -> None:
    names = [rule["alert"] for rule in RULES]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_panels_use_exported_metrics_and_have_descriptions(panel: Object) -> None:
    assert panel["description"]
    for target in panel["targets"]:
        assert list(impossible(target["expr"])) == []


def test_variables_of_the_dashboard_are_labels_of_a_series_that_every_pod_has() -> None:
    queries = [each["query"]["query"] for each in DASHBOARD["templating"]["list"] if each["type"] == "query"]
    found = [re.fullmatch(r"label_values\((\w+)(\{.*\})?, (\w+)\)", query) for query in queries]
    assert [(match[1], match[3]) for match in found if match] == [
        ("megatron_ready", "namespace"),
        ("megatron_ready", BY_THE_POD_MONITOR),
    ]
    assert "megatron_ready" in SERIES


def test_panels_do_not_overlap() -> None:
    cells: list[tuple[int, int]] = []
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        columns, rows = range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"])
        cells += [(column, row) for column in columns for row in rows]
    assert len(cells) == len(set(cells))
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))


def test_every_exported_metric_is_on_the_dashboard_or_excluded() -> None:
    shown = {
        part.name
        for panel in PANELS
        for target in panel["targets"]
        for part in parts(target["expr"])
        if isinstance(part, VectorSelector)
    }
    families = {re.sub(r"_(total|bucket|sum|count|created)$", "", name) for name in SERIES}
    on_dashboard = {re.sub(r"_(total|bucket|sum|count)$", "", str(name)) for name in shown}
    assert families - on_dashboard == {
        "megatron_operator_leading",  # covered by an alert
        "megatron_operator_resource_phase",  # covered by alerts; the dashboard counts resources by phase
        "megatron_ready",  # Kubernetes shows the readiness of pods
        "megatron_kv_blocks",  # the same as megatron_kv_usage, in blocks
        "megatron_weight_version",
        "megatron_generation_tokens",  # counted per replica group
        "megatron_replica_group_prompt_tokens",
        "megatron_activator_body_bytes",
    }


@pytest.mark.parametrize("name", QUESTIONS)
def test_the_queries_of_the_reference_use_their_own_metric(name: str) -> None:
    query = QUESTIONS[name].query
    assert list(impossible(query)) == []
    asked = {str(part.name) for part in parts(query) if isinstance(part, VectorSelector)}
    assert asked & {name, f"{name}_bucket"}


def test_the_reference_of_metrics_is_up_to_date() -> None:
    assert (ROOT / PAGE).read_text() == reference_text()
    families = [*of_the_operator(), *of_an_activator(), *of_a_pod(), *of_a_frontend()]
    assert sorted(map(series_name, families)) == sorted(QUESTIONS)


@pytest.mark.parametrize(
    "query",
    [
        "sum(megatron_request_total)",
        'megatron_operator_resources{phase="Broken"}',
        'megatron_operator_resources{stage="Failed"}',
        "sum by (replica) (megatron_kv_usage)",
    ],
)
def test_a_query_of_a_missing_metric_is_found(query: str) -> None:
    assert list(impossible(query))


def test_an_invalid_query_is_found() -> None:
    with pytest.raises(ValueError, match="unclosed left parenthesis"):
        parsed("sum(rate(megatron_requests_total)")


def test_the_monitors_find_the_ports_of_operator_and_models(helm: Helm) -> None:
    objects = helm.template(*MONITORED)
    service, monitor = only(objects, "Service"), only(objects, "ServiceMonitor")["spec"]
    assert monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    (scraped,) = monitor["endpoints"]
    assert scraped["port"] == service["spec"]["ports"][0]["name"]
    assert scraped["honorLabels"] is True  # the namespace of a resource, not that of the operator
    obj = manifest()
    obj["metadata"] |= {"namespace": "ns", "uid": "u"}
    pod = render_pod(parse_resource(obj), PodIdentity(1, 0, 0, False, "hash", 0), Settings())
    models = only(objects, "PodMonitor")["spec"]
    (label,) = (each["key"] for each in models["selector"]["matchExpressions"])
    (endpoint,) = models["podMetricsEndpoints"]
    assert pod["metadata"]["labels"][label] == "chat"
    assert endpoint["port"] in [port["name"] for port in pod["spec"]["containers"][0]["ports"]]
    (relabeling,) = endpoint["relabelings"]
    assert relabeling["sourceLabels"] == ["__meta_kubernetes_pod_label_" + re.sub(r"\W", "_", label)]
    assert relabeling["targetLabel"] == BY_THE_POD_MONITOR


def test_the_monitor_of_activators_finds_their_port(helm: Helm) -> None:
    objects = helm.template(*MONITORED, "--set=activator.enabled=true")
    monitor = next(each["spec"] for each in of_kind(objects, "PodMonitor") if "activator" in each["metadata"]["name"])
    pods = [each["spec"]["template"] for each in of_kind(objects, "Deployment")]
    wanted = monitor["selector"]["matchLabels"].items()
    (pod,) = (each for each in pods if wanted <= each["metadata"]["labels"].items())
    (endpoint,) = monitor["podMetricsEndpoints"]
    (port,) = (each for each in pod["spec"]["containers"][0]["ports"] if each["name"] == endpoint["port"])
    assert f"--metrics-port={port['containerPort']}" in pod["spec"]["containers"][0]["args"]
    assert endpoint["honorLabels"] is True


def test_the_monitor_of_models_selects_the_namespaces_of_the_operator(helm: Helm) -> None:
    where = [
        only(helm.template(*MONITORED, *more), "PodMonitor")["spec"]["namespaceSelector"]
        for more in ((), ("--set=namespaces={alpha,beta}",))
    ]
    assert where == [{"any": True}, {"matchNames": ["alpha", "beta"]}]


def test_rules_and_dashboard_are_rendered_as_they_are_written(helm: Helm) -> None:
    objects = helm.template(*MONITORED, "--set=metrics.labels.release=prometheus")
    rule = only(objects, "PrometheusRule")
    assert [each for group in rule["spec"]["groups"] for each in group["rules"]] == RULES
    board = only(objects, "ConfigMap")
    assert json.loads(board["data"]["megatron-inference.json"]) == DASHBOARD
    assert board["metadata"]["labels"]["grafana_dashboard"] == "1"
    for kind in ("PrometheusRule", "ServiceMonitor", "PodMonitor"):
        assert only(objects, kind)["metadata"]["labels"]["release"] == "prometheus"


def test_monitoring_is_disabled_by_default(helm: Helm) -> None:
    kinds = {each["kind"] for each in helm.template()}
    assert not kinds & {"ServiceMonitor", "PodMonitor", "PrometheusRule", "ConfigMap"}
