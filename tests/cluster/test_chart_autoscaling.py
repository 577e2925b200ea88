"""The autoscalers in the examples: their metric exists, and they do not oscillate."""

import math
import re

import pytest
import yaml
from chart_support.exported import exported
from chart_support.helm import Object
from operator_support.fixtures import ROOT
from promql_parser import parse

from megatron_operator.api.v1alpha1 import API_VERSION, GROUP, KIND

COUNTED = {"megatron_requests_running", "megatron_requests_waiting", "megatron_requests_paused"}
BLOCKS = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "examples.md").read_text(), re.S)
OBJECTS: dict[str, Object] = {obj["kind"]: obj for block in BLOCKS for obj in yaml.safe_load_all(block)}
(RULE,) = yaml.safe_load(OBJECTS["ConfigMap"]["data"]["config.yaml"])["rules"]
(METRIC,) = OBJECTS["HorizontalPodAutoscaler"]["spec"]["metrics"]
(TRIGGER,) = OBJECTS["ScaledObject"]["spec"]["triggers"]
BUSY = 64
"""Requests that a replica group runs at a time."""


def counted(query: str) -> set[str]:
    """The exported series that the query sums up."""
    parse(query)
    (pattern,) = re.findall(r'__name__=~"([^"]+)"', query)
    return {name for name in exported() if re.fullmatch(pattern, name)}


def test_both_count_all_requests_of_a_resource() -> None:
    of_the_adapter = RULE["metricsQuery"].replace("<<.GroupBy>>", "megatroninference")
    assert counted(of_the_adapter.replace("<<.LabelMatchers>>", 'namespace="default"')) == COUNTED
    assert counted(TRIGGER["metadata"]["query"]) == COUNTED


def test_the_rule_of_the_adapter_makes_the_metric_of_the_hpa() -> None:
    wanted = METRIC["object"]
    assert RULE["name"]["as"] == wanted["metric"]["name"]
    assert RULE["resources"]["overrides"]["megatroninference"] == {"group": GROUP, "resource": KIND.lower()}
    assert (wanted["describedObject"]["apiVersion"], wanted["describedObject"]["kind"]) == (API_VERSION, KIND)


def replica_groups(kind: str, target: float, clients: int, *, counts_waiting_alone: bool = False) -> list[int]:
    """The numbers that the algorithm of the HPA sets one after the other, as from one replica group on.

    Each client has one request at a time, which runs in one of the ``BUSY`` places of a replica group, or waits.
    """
    seen = [1]
    for _ in range(8):
        waiting = max(0, clients - seen[-1] * BUSY)
        value = waiting if counts_waiting_alone else clients
        desired = math.ceil({"Value": seen[-1], "AverageValue": 1}[kind] * value / target)
        seen.append(min(8, max(1, desired)))
    return seen[1:]


@pytest.mark.parametrize(
    ("kind", "target"),
    [
        (METRIC["object"]["target"]["type"], METRIC["object"]["target"]["averageValue"]),
        (TRIGGER["metricType"], TRIGGER["metadata"]["threshold"]),
    ],
    ids=["hpa", "keda"],
)
@pytest.mark.parametrize("clients", [1, 64, 65, 200, 480])
def test_a_constant_load_gives_a_constant_and_sufficient_number_of_replica_groups(
    kind: str, target: str, clients: int
) -> None:
    (replicas,) = set(replica_groups(kind, float(target), clients))
    assert clients / replicas <= float(target)


def test_a_target_on_waiting_requests_alone_oscillates() -> None:
    """They are zero whenever there are enough replica groups. The examples once had such a target."""
    assert set(replica_groups("Value", 4, 200, counts_waiting_alone=True)) == {1, 8}
