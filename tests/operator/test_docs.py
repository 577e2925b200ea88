"""The docs agree with the operator."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from suite_support.kubernetes_schemas import check

from megatron_operator import conditions, replica_groups, restarts, status
from megatron_operator.api.crd import crd
from megatron_operator.api.v1alpha1 import API_VERSION, KIND
from megatron_operator.kubernetes import pod_status
from megatron_operator.reconcile import validated
from megatron_operator.settings import Settings

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
OPERATOR = ROOT / "operator" / "megatron_operator"
PAGES = sorted(DOCS.glob("*.md"))


def reasons_told() -> set[str]:
    """The reasons in the first column of the table in operations.md."""
    text = (DOCS / "operations.md").read_text().split("## Reasons of conditions")[1].split("##")[0]
    rows = [line.split("|") for line in text.splitlines() if line.startswith("|")]
    return {word for row in rows for word in re.findall(r"`([A-Z]\w+)`", row[1])}


def test_every_reason_in_the_docs_exists_in_the_operator() -> None:
    source = "".join(path.read_text() for path in OPERATOR.rglob("*.py"))
    assert [reason for reason in sorted(reasons_told()) if f'"{reason}"' not in source] == []


def test_every_reason_of_a_condition_is_in_the_docs() -> None:
    given = {
        conditions.AUTO_SUSPENDED,
        conditions.GROUP_FAILED,
        replica_groups.UNSCHEDULABLE,
        replica_groups.SCHEDULING_GATED,
    }
    given |= {
        replica_groups.STARTUP_TIMEOUT,
        replica_groups.LOST_RANK,
        restarts.RESTART_BUDGET_EXCEEDED,
        status.INVALID_SPEC,
    }
    given |= {pod_status.IMAGE_PULL, *conditions.IN_PROGRESS_REASONS.values()}
    for name in ("conditions.py", "wait_reasons.py"):
        given |= set(
            re.findall(r'(?:ConditionState\("\w+"|WaitReason\(|_why\("\w+"), ?"(\w+)"', (OPERATOR / name).read_text())
        )
        given |= set(re.findall(r'WaitReason\("(\w+)"', (OPERATOR / name).read_text()))
    assert sorted(given - reasons_told() - {"AsExpected", "NoEngine"}) == []


def manifests_told() -> list[dict[str, Any]]:
    """The objects in the pages, as YAML."""
    blocks = [block for page in PAGES for block in re.findall(r"```yaml\n(.*?)```", page.read_text(), re.S)]
    return [obj for block in blocks for obj in yaml.safe_load_all(block)]


def test_the_resources_in_the_docs_are_valid() -> None:
    told = [obj for obj in manifests_told() if obj["kind"] == "MegatronInference"]
    assert len(told) >= 6
    for obj in told:
        assert validated(obj, Settings()).name == obj["metadata"]["name"]


def test_the_other_objects_in_the_docs_match_kubernetes_schemas() -> None:
    told = [obj for obj in manifests_told() if "." not in obj["apiVersion"].partition("/")[0]]
    assert {obj["kind"] for obj in told} >= {"HorizontalPodAutoscaler", "PersistentVolumeClaim"}
    for obj in told:
        check(obj)


def test_autoscalers_in_the_docs_refer_to_existing_fields_and_limits() -> None:
    replicas = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]["replicas"]
    resources = {obj["metadata"]["name"] for obj in manifests_told() if obj["kind"] == KIND}
    scalers = {obj["kind"]: obj["spec"] for obj in manifests_told() if "scaleTargetRef" in obj.get("spec", {})}
    limits = {
        "HorizontalPodAutoscaler": ("minReplicas", "maxReplicas"),
        "ScaledObject": ("minReplicaCount", "maxReplicaCount"),
    }
    assert scalers.keys() == limits.keys()
    for kind, spec in scalers.items():
        target = spec["scaleTargetRef"]
        assert (target["apiVersion"], target["kind"]) == (API_VERSION, KIND)
        assert target["name"] in resources
        least, most = (spec[field] for field in limits[kind])
        assert replicas["minimum"] <= least < most <= replicas["maximum"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_have_targets(page: Path) -> None:
    links = re.findall(r"\]\((?!http)([^)#]+)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []
