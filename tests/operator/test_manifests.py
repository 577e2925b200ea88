"""The manifests that are applied by hand; tests/cluster/test_chart_rendering.py compares the chart with them."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
from suite_support import yaml_documents

from megatron_operator.api.parse import parse_resource
from megatron_operator.kubernetes.api_server import PATHS, group_version_plural
from megatron_operator.settings import DEFAULT_IMAGE, IMAGE_VARIABLE

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "megatron-inference"
MANIFESTS = ROOT / "manifests"

Rule = dict[str, Any]


def of_kind(kind: str, *files: str) -> list[dict[str, Any]]:
    documents = [each for file in files for each in yaml_documents.load_all((MANIFESTS / file).read_text())]
    return [each for each in documents if each["kind"] == kind]


def granted_rules() -> list[Rule]:
    (everywhere,), (at_home,) = of_kind("ClusterRole", "rbac.yaml"), of_kind("Role", "rbac.yaml")
    return [*everywhere["rules"], *at_home["rules"]]


def test_no_rule_has_a_wildcard_and_secrets_can_not_be_listed() -> None:
    for rule in granted_rules():
        assert "*" not in [*rule["apiGroups"], *rule["resources"], *rule["verbs"]]
        if "secrets" in rule["resources"]:
            assert set(rule["verbs"]) == {"get", "create"}


def test_the_security_page_lists_the_current_rules() -> None:
    page = (ROOT / "docs" / "security.md").read_text()
    rows = re.findall(r"^\| (`[\w.-]+`|core) \| `([\w/]+)` \| ([a-z, ]+) \|", page, re.MULTILINE)
    listed = {(group.strip("`"), resource): verbs.split(", ") for group, resource, verbs in rows}
    granted: dict[tuple[str, str], list[str]] = {}
    for rule in granted_rules():
        for group, resource in itertools.product(rule["apiGroups"], rule["resources"]):
            granted.setdefault((group or "core", resource), []).extend(rule["verbs"])
    assert listed == granted


@pytest.mark.parametrize("kind", sorted(PATHS))
def test_the_role_has_every_kind_that_the_operator_uses(kind: str) -> None:
    group, _, plural = group_version_plural(kind)
    granted = {
        (api, resource) for rule in granted_rules() for api in rule["apiGroups"] for resource in rule["resources"]
    }
    assert (group, plural) in granted


@pytest.mark.parametrize("sample", sorted((MANIFESTS / "samples").glob("*.yaml")), ids=lambda sample: sample.stem)
def test_every_sample_is_valid(sample: Path) -> None:
    resource = parse_resource(yaml_documents.load(sample.read_text()))
    assert resource.name == sample.stem


def test_the_deployment_never_runs_two_versions_at_once() -> None:
    (deployment,) = of_kind("Deployment", "operator.yaml")
    assert (deployment["spec"]["replicas"], deployment["spec"]["strategy"]) == (1, {"type": "Recreate"})


@pytest.mark.parametrize("folder", [MANIFESTS, MANIFESTS / "activator"], ids=lambda folder: folder.name)
def test_a_kustomization_lists_exactly_the_files(folder: Path) -> None:
    listed = yaml_documents.load((folder / "kustomization.yaml").read_text())["resources"]
    present = {path.name for path in folder.glob("*.yaml")} - {"kustomization.yaml"}
    assert set(listed) == present


def test_the_chart_has_the_version_of_the_package() -> None:
    from importlib.metadata import version

    chart = yaml_documents.load((CHART / "Chart.yaml").read_text())
    ours = version("megatron-inference")
    assert (chart["version"], chart["appVersion"]) == (ours, ours)


def test_the_manifests_have_the_default_image_of_the_operator() -> None:
    (deployment,) = of_kind("Deployment", "operator.yaml")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    variables = {each["name"]: each.get("value") for each in container["env"]}
    assert variables[IMAGE_VARIABLE] == DEFAULT_IMAGE
