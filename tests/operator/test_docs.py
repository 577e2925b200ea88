"""The docs agree with the operator."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import yaml
from suite_support import yaml_documents
from suite_support.console_runs import NOT_RUN, RUN, block_of
from suite_support.doc_blocks import PAGES, ROOT, doc_blocks, output_after
from suite_support.kubernetes_schemas import check

from megatron_operator import conditions, replica_groups, restarts, status
from megatron_operator.api.crd import crd
from megatron_operator.api.v1alpha1 import API_VERSION, KIND
from megatron_operator.kubernetes import pod_status
from megatron_operator.reconcile import validated
from megatron_operator.settings import IMAGE_VARIABLE, Settings

DOCS = ROOT / "docs"
OPERATOR = ROOT / "operator" / "megatron_operator"


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


OTHER_KINDS = {
    "ScaledObject": "compared with the resource below; its schema is KEDA's",
    "Application": "compared with the permissions in test_gitops.py; its schema is Argo CD's",
    "Kustomization": "kubectl builds it below; that of Flux is compared in test_gitops.py",
}
"""Kinds whose schema is not here, with what is checked instead."""
UNCHECKED_LANGUAGES = {"mermaid": "a diagram", "": "the map of the source tree, which tests/test_layout.py compares"}
CHECKED_LANGUAGES = {
    "yaml": "below",
    "console": "suite_support/console_runs.py has the test of each; tests/e2e/test_docs_commands.py parses all",
    "bash": "tests/e2e/test_docs_commands.py; as scripts tests/runtime/server/clients/test_docs_examples.py, and on a "
    "node tests/cluster/test_node_serving.py",
    "javascript": "tests/runtime/server/clients/test_docs_examples.py",
    "python": "by page, see below",
    "text": "the output of the block before it, by the same test",
}
PAGES_WITH_PYTHON = {
    "README.md": "tests/runtime/examples/test_docs_library.py",
    "docs/reinforcement-learning.md": "tests/runtime/examples/test_docs_library.py",
    "docs/http-api.md": "tests/runtime/server/clients/test_docs_examples.py",
}


def manifests_told() -> list[dict[str, Any]]:
    """The objects in the README and the pages, as YAML."""
    return [obj for block in doc_blocks("yaml") for obj in yaml_documents.load_all(block.text)]


def test_every_code_block_has_a_test() -> None:
    blocks = doc_blocks()
    assert {block.language for block in blocks} == CHECKED_LANGUAGES.keys() | UNCHECKED_LANGUAGES.keys()
    assert {block.page for block in blocks if block.language == "python"} == PAGES_WITH_PYTHON.keys()
    followed = [output_after(block) for block in doc_blocks("python", "javascript")]
    assert [block.text for block in doc_blocks("text")] == [text for text in followed if text is not None]
    told = {obj["kind"] for obj in manifests_told() if not is_built_in(obj)}
    assert told == {KIND, *OTHER_KINDS}


def test_the_test_of_every_console_block_is_listed_or_why_it_has_none() -> None:
    assert not RUN.keys() & NOT_RUN.keys()
    listed = [str(block_of(name)) for name in (*RUN, *NOT_RUN)]
    assert sorted(listed) == sorted(str(block) for block in doc_blocks("console"))
    for name, run in RUN.items():
        assert run.but.keys() < {step.words[0] for step in block_of(name).steps}


def names_taken(function: str) -> set[tuple[str, ...]]:
    """The blocks that a function, given as `file::name`, takes from the list."""
    file, _, name = function.partition("::")
    nodes = ast.walk(ast.parse((ROOT / file).read_text()))
    functions = (each for each in nodes if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef))
    (found,) = (each for each in functions if each.name == name)
    calls = [each for each in ast.walk(found) if isinstance(each, ast.Call) and ast.unparse(each.func) == "documented"]
    return {tuple(ast.literal_eval(word) for word in call.args) for call in calls}


@pytest.mark.parametrize("name", RUN, ids=" ".join)
def test_the_tests_that_are_listed_for_a_block_take_it(name: tuple[str, str]) -> None:
    assert [function for function in RUN[name].functions if name not in names_taken(function)] == []


def test_the_overlay_has_the_images_of_the_registry(tmp_path: Path) -> None:
    (overlay,) = (
        obj for obj in manifests_told() if obj["apiVersion"].startswith("kustomize.config") and "images" in obj
    )
    shutil.copytree(ROOT / "manifests", tmp_path / "manifests")
    (tmp_path / "overlay").mkdir()
    (tmp_path / "overlay/kustomization.yaml").write_text(yaml.safe_dump(overlay))
    kubectl = Path(sysconfig.get_path("scripts")) / "kubectl"
    done = subprocess.run([kubectl, "kustomize", tmp_path / "overlay"], capture_output=True, text=True, check=True)
    (deployment,) = (obj for obj in yaml_documents.load_all(done.stdout) if obj["kind"] == "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    images = [container["image"], *(each["value"] for each in container["env"] if each["name"] == IMAGE_VARIABLE)]
    assert all(image.startswith("registry.example.com/megatron/") for image in images)
    assert [image.rpartition(":")[2] for image in images] == ["0.1.0", "0.1.0-{device}"]


def is_built_in(obj: dict[str, Any]) -> bool:
    """Whether the kind is one of Kubernetes, whose groups in the docs have no dot."""
    group = obj["apiVersion"].rpartition("/")[0]
    return "." not in group


def test_the_resources_in_the_docs_are_valid() -> None:
    told = [obj for obj in manifests_told() if obj["kind"] == "MegatronInference"]
    assert len(told) >= 6
    for obj in told:
        assert validated(obj, Settings()).name == obj["metadata"]["name"]


def test_the_other_objects_in_the_docs_match_kubernetes_schemas() -> None:
    told = [obj for obj in manifests_told() if is_built_in(obj)]
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


OTHER_PAGES = [ROOT / name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md")]
"""Pages with links, besides those with code blocks."""


def heading_anchors(page: Path) -> set[str]:
    """The anchors of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.S), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, *OTHER_PAGES], ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_have_targets(page: Path) -> None:
    links = re.findall(r"\]\((?!http)([^)#]*)(?:#([^)]+))?\)", page.read_text())
    assert [link for link, _ in links if not (page.parent / link).exists()] == []
    targets = [((page.parent / link) if link else page, anchor) for link, anchor in links if anchor]
    assert [anchor for target, anchor in targets if anchor not in heading_anchors(target)] == []
