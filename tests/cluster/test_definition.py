"""The CRD on a current API server: accepted, enforced, upgraded, explained."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from cluster_support.cluster import Cluster, wait_until
from cluster_support.control_plane import ControlPlane
from cluster_support.pki import write_kubeconfig
from operator_support.api import Api, ApiFailure, Json
from operator_support.fixtures import MANIFESTS
from operator_support.resource import manifest
from suite_support import yaml_documents
from suite_support.definition import RULES, without_rules

from megatron_operator.api.crd import crd
from megatron_operator.api.parse import parse_resource

NAME = crd()["metadata"]["name"]
DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
BEFORE = Path(__file__).parent / "data/previous_crd.yaml"
SCHEMA = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
BROKEN: dict[str, dict[str, Any]] = {
    "spec.model.source": {"model": {"source": {}}},
    "spec.model.cache": {"model": {"source": {"huggingFace": {"repo": "a/b"}}, "cache": {}}},
    "spec.model.cache (source)": {"model": {"source": {"path": "/m"}, "cache": {"claimName": "c"}}},
    "spec.model.source.objectStorage": {"model": {"source": {"objectStorage": {"uri": "s3://models/a"}}}},
    "spec.model.cache.hostPath": {
        "model": {"source": {"huggingFace": {"repo": "a/b"}}, "cache": {"hostPath": {"path": "/m"}}}
    },
    "spec.parallelism.expert": {"parallelism": {"tensor": 6, "expert": 4}},
    "spec.pods.ranksPerPod": {"pods": {"device": "cpu", "ranksPerPod": 2}},
    "spec.parallelism.tensor": {
        "parallelism": {"tensor": 1024, "pipeline": 2},
        "pods": {"device": "cpu", "ranksPerPod": 64},
    },
    "spec.replicas": {"replicas": 513, "parallelism": {"tensor": 2}},
    "spec.rollout.maxUnavailable": {"rollout": {"maxUnavailable": 0, "maxSurge": 0}},
    "spec.autoSuspend.stopAfter": {"autoSuspend": {"idleAfter": "0m", "stopAfter": "1h"}},
    "spec.engine.speculation.draftModel": {"engine": {"speculation": {"method": "DraftModel"}}},
    "spec.routing.policy": {"engine": {"prefixCaching": False}, "routing": {"policy": "LongestPrefix"}},
    "spec.frontend.parsers": {"frontend": {"parsers": ["qwen3", "deepseek_r1"]}},
    "spec.pods.resources": {"pods": {"device": "cpu", "resources": {"limits": {"nvidia.com/gpu": 1}}}},
    "spec.pods.resourceClaims": {"pods": {"device": "cpu", "resourceClaims": [{"name": "a"}]}},
    "spec.pods.gpuAllocation": {"pods": {"device": "cuda", "gpuAllocation": "ResourceClaims"}},
    "spec.scheduling.tolerations (no key)": {"scheduling": {"tolerations": [{"value": "a"}]}},
    "spec.scheduling.tolerations (value)": {
        "scheduling": {"tolerations": [{"key": "a", "operator": "Exists", "value": "b"}]}
    },
    "spec.scheduling.tolerations (seconds)": {"scheduling": {"tolerations": [{"key": "a", "tolerationSeconds": 1}]}},
    "spec.expose.clientsFrom (no peer)": {"expose": {"clientsFrom": [{}]}},
    "spec.expose.clientsFrom (values)": {
        "expose": {"clientsFrom": [{"podSelector": {"matchExpressions": [{"key": "a", "operator": "In"}]}}]}
    },
    "spec.failurePolicy.backoff": {"failurePolicy": {"backoff": "87601h"}},
}
"""For each rule of the spec, a resource that violates only this rule; the key begins with its field."""


pytestmark = pytest.mark.usefixtures("ruled")


def read_yaml(file: Path) -> Any:
    return yaml_documents.load(file.read_text())


def resources(namespace: str) -> str:
    return f"/apis/inference.megatron.dev/v1alpha1/namespaces/{namespace}/megatroninferences"


def schema_nodes(schema: Json) -> Iterator[Json]:
    yield schema
    for child in (*schema.get("properties", {}).values(), *([schema["items"]] if "items" in schema else [])):
        yield from schema_nodes(child)


def rules_of(definition: Json) -> list[str]:
    """The messages of all rules."""
    schema = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return [rule["message"] for node in schema_nodes(schema) for rule in node.get(RULES, [])]


def test_the_control_plane_of_the_tests_is_one_that_enforces_rules(own_control_plane: ControlPlane) -> None:
    assert own_control_plane.knows_cel


def test_the_definition_is_stored_with_all_of_its_rules(ruled: Cluster) -> None:
    assert sorted(rules_of(ruled.get("crd", NAME))) == sorted(rules_of(crd()))
    assert len(set(rules_of(crd()))) == len(BROKEN) + 1  # that of the name


async def test_the_definition_has_no_field_unknown_to_the_server(ruled: Cluster, api: Api) -> None:
    version = ruled.get("crd", NAME)["metadata"]["resourceVersion"]
    definition = crd() | {"metadata": {"name": NAME, "resourceVersion": version}}
    stored = await api.put(f"{DEFINITIONS}/{NAME}?dryRun=All&fieldValidation=Strict", definition)
    assert stored["spec"]["versions"][0]["schema"]["openAPIV3Schema"].keys() == SCHEMA.keys()
    definition["spec"]["versions"][0]["unknown"] = True
    with pytest.raises(ApiFailure, match="unknown field"):
        await api.put(f"{DEFINITIONS}/{NAME}?dryRun=All&fieldValidation=Strict", definition)


def test_kubectl_applies_the_manifests_as_the_readme_says(ruled: Cluster) -> None:
    applied = ruled.kubectl("apply", "--dry-run=server", "-k", str(MANIFESTS))
    assert f"customresourcedefinition.apiextensions.k8s.io/{NAME} " in applied


async def test_an_omitted_object_has_the_defaults_of_all_its_fields(api: Api, namespace: str) -> None:
    stored = await api.post(f"{resources(namespace)}?dryRun=All", manifest())
    assert stored["spec"]["engine"] == SCHEMA["properties"]["spec"]["properties"]["engine"]["default"]
    assert stored["spec"]["parallelism"] == {"tensor": 1, "pipeline": 1, "expert": 1}
    partly = await api.post(f"{resources(namespace)}?dryRun=All", manifest(parallelism={"tensor": 4}))
    assert partly["spec"]["parallelism"] == {"tensor": 4, "pipeline": 1, "expert": 1}


@pytest.mark.parametrize("rule", BROKEN)
async def test_a_resource_that_breaks_a_rule_is_refused_with_the_field_and_the_remedy(
    api: Api, namespace: str, rule: str
) -> None:
    with pytest.raises(ApiFailure) as refused:
        await api.post(f"{resources(namespace)}?dryRun=All", manifest(**BROKEN[rule]))
    assert refused.value.status == 422
    assert f"{rule.partition(' ')[0]}: " in str(refused.value)


async def test_a_resource_with_a_name_that_services_cannot_have_is_refused(api: Api, namespace: str) -> None:
    with pytest.raises(ApiFailure, match=r"metadata\.name: must start with a letter"):
        await api.post(f"{resources(namespace)}?dryRun=All", manifest("1st"))


@pytest.mark.parametrize("sample", [path.stem for path in sorted((MANIFESTS / "samples").glob("*.yaml"))])
async def test_a_sample_is_accepted_with_strict_field_validation(api: Api, namespace: str, sample: str) -> None:
    path = f"{resources(namespace)}?dryRun=All&fieldValidation=Strict"
    stored = await api.post(path, read_yaml(MANIFESTS / "samples" / f"{sample}.yaml"))
    assert parse_resource(stored).name == sample


async def test_a_misspelt_field_is_refused_by_strict_field_validation(api: Api, namespace: str) -> None:
    with pytest.raises(ApiFailure, match=r"unknown field \"spec.lifecycel\""):
        await api.post(f"{resources(namespace)}?fieldValidation=Strict", manifest(lifecycel="Paused"))


@pytest.fixture
async def published(own_control_plane: ControlPlane, tmp_path: Path) -> AsyncIterator[Path]:
    """A kubeconfig with which kubectl finds OpenAPI v3 in addition to the API."""

    def is_published() -> bool:
        document = own_control_plane.custom_resources("/openapi/v3/apis/inference.megatron.dev/v1alpha1")
        return "/megatroninferences/" in document

    await asyncio.to_thread(wait_until, is_published, "the OpenAPI of the definition")

    async def read(request: web.Request) -> web.Response:
        path = request.raw_path
        if path.startswith("/openapi/v3"):
            text = await asyncio.to_thread(own_control_plane.custom_resources, path)
            return web.Response(text=text, content_type="application/json")
        found = await asyncio.to_thread(own_control_plane.read, path)
        return web.json_response(found, status=404 if found is None else 200)

    application = web.Application()
    application.router.add_get("/{path:.*}", read)
    async with TestServer(application) as server:
        write_kubeconfig(tmp_path / "kubeconfig", "reader", {"server": str(server.make_url(""))}, {})
        yield tmp_path / "kubeconfig"


async def test_kubectl_explain_has_every_field(own_control_plane: ControlPlane, published: Path) -> None:
    async def explain(*words: str) -> str:
        return await asyncio.to_thread(own_control_plane.kubectl, "explain", *words, kubeconfig=published)

    fields = (await explain("mi.spec", "--recursive")).partition("FIELDS:\n")[2].splitlines()
    assert [line.split("\t")[0] for line in fields if "\t" in line] == outline(SCHEMA["properties"]["spec"])
    assert "Memory per rank for the KV cache" in await explain("mi.spec.engine.kvCacheMemory")


def outline(node: Json, indent: int = 2) -> list[str]:
    """The names of all fields, indented like the output of ``kubectl explain``."""
    fields = sorted(node.get("properties", {}).items())
    below = (outline(each.get("items", each), indent + 2) for _, each in fields)
    return [line for (name, _), lines in zip(fields, below, strict=True) for line in (f"{' ' * indent}{name}", *lines)]


@pytest.fixture
def upgraded(ruled: Cluster, api: Api, namespace: str) -> Iterator[None]:  # noqa: ARG001
    """Restores the current CRD after a test that applied another one."""
    yield
    ruled.define(crd())


@pytest.mark.usefixtures("upgraded", "own_control_plane")
async def test_an_upgrade_from_the_previous_definition_keeps_its_resources_usable(
    ruled: Cluster, api: Api, namespace: str
) -> None:
    """Sizes of 0 were accepted. Kubernetes 1.30 and newer compare an update with the stored object (ratcheting)."""
    ruled.define(without_rules(read_yaml(BEFORE)))
    for each in (manifest("good"), manifest("empty", engine={"kvCacheMemory": "0"})):
        await api.post(resources(namespace), each)
    ruled.define(crd())
    path = f"{resources(namespace)}/empty"
    assert (await api.get(path))["spec"]["engine"]["kvCacheMemory"] == "0"
    assert (await api.merge(path, {"metadata": {"labels": {"team": "a"}}}))["metadata"]["labels"] == {"team": "a"}
    assert (await api.merge(f"{path}/status", {"status": {"phase": "Failed"}}))["status"]["phase"] == "Failed"
    assert (await api.merge(path, {"spec": {"lifecycle": "Stopped"}}))["spec"]["lifecycle"] == "Stopped"
    with pytest.raises(ApiFailure, match="kvCacheMemory"):
        await api.merge(path, {"spec": {"engine": {"kvCacheMemory": "0Gi"}}})
    good = await api.merge(f"{resources(namespace)}/good", {"spec": {"replicas": 2}})
    assert (good["spec"]["replicas"], good["spec"]["engine"]["blockSizeTokens"]) == (2, 16)


@pytest.mark.usefixtures("upgraded", "own_control_plane")
async def test_a_resource_that_breaks_a_rule_can_be_read_reported_on_and_corrected_after_an_upgrade(
    ruled: Cluster, api: Api, namespace: str
) -> None:
    """Servers that drop the rules stored it; the operator rejected it in a condition."""
    ruled.define(without_rules(crd()))
    await api.post(resources(namespace), manifest("broken", pods={"device": "cpu", "ranksPerPod": 2}))
    ruled.define(crd())
    path = f"{resources(namespace)}/broken"
    assert (await api.merge(f"{path}/status", {"status": {"phase": "Failed"}}))["status"]["phase"] == "Failed"
    with pytest.raises(ApiFailure, match=r"spec\.pods\.ranksPerPod"):
        await api.merge(path, {"spec": {"pods": {"ranksPerPod": 3}}})
    assert (await api.merge(path, {"spec": {"pods": {"ranksPerPod": 1}}}))["spec"]["pods"]["ranksPerPod"] == 1
    await api.delete(path)


async def test_current_servers_reject_the_previous_definition(api: Api) -> None:
    """Reproduces the defect: servers evaluate rules on the written defaults."""
    before = read_yaml(BEFORE)
    renamed = json.loads(json.dumps(before).replace("inference.megatron.dev", "before.megatron.dev"))
    with pytest.raises(ApiFailure, match="no such key: tensor"):
        await api.post(f"{DEFINITIONS}?dryRun=All", renamed)
