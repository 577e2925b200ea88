"""All pods of the project conform to the Pod Security level `restricted`."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import yaml
from chart_support.helm import ROOT, Helm, Object, of_kind, only
from chart_support.pod_security import violations
from chart_support.values import VARIANTS
from operator_support.resource import manifest

from megatron_operator.api.parse import parse_resource
from megatron_operator.names import PodIdentity
from megatron_operator.render import download_job, render_pod
from megatron_operator.render.cache_eviction import eviction_job, unused_record
from megatron_operator.settings import Settings

SPECS: dict[str, Object] = {
    "on a CPU": {},
    "on GPUs, over pods": {"pods": {"device": "cuda", "ranksPerPod": 2}, "parallelism": {"tensor": 4}},
    "from a volume": {"model": {"source": {"persistentVolumeClaim": {"claimName": "m", "path": "/x"}}}},
    "from an image": {"model": {"source": {"image": {"reference": "registry/m:1"}}}},
    "from the hub": {
        "model": {"source": {"huggingFace": {"repo": "org/m", "tokenSecret": {"name": "hf", "key": "token"}}}}
    },
    "from a cache": {"model": {"source": {"huggingFace": {"repo": "org/m"}}, "cache": {"claimName": "c"}}},
    "with API keys": {"frontend": {"apiKeysSecret": {"name": "keys"}}},
    "with a sidecar's volume": {"podTemplate": {"spec": {"volumes": [{"name": "more", "emptyDir": {}}]}}},
}


def model_pod(index: int = 0, **spec: Any) -> Object:
    obj = manifest(**spec)
    obj["metadata"] |= {"namespace": "ns", "uid": "u"}
    return render_pod(parse_resource(obj), PodIdentity(0, 0, index, index == 0, "hash", 0), Settings())


def pod_of(deployment: Object) -> Object:
    template: Object = deployment["spec"]["template"]
    return template


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("spec", SPECS)
def test_a_pod_of_a_model_is_restricted(spec: str, index: int) -> None:
    pod = model_pod(index, **SPECS[spec])
    assert violations(pod) == []
    assert pod["spec"]["automountServiceAccountToken"] is False
    assert "serviceAccountName" not in pod["spec"]
    for container in pod["spec"]["containers"]:
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert "add" not in container["securityContext"]["capabilities"]


def test_jobs_of_a_claim_are_restricted_and_those_of_a_node_need_a_privileged_namespace() -> None:
    def download(**cache: Any) -> Object:
        obj = manifest(model={"source": {"huggingFace": {"repo": "org/m"}}, "cache": cache})
        obj["metadata"] |= {"namespace": "ns", "uid": "u"}
        node = "n" if "hostPath" in cache else None
        job: Object = download_job(parse_resource(obj), "runtime:1", node)
        return job

    for job in (of_claim := download(claimName="c"), eviction_job(unused_record(of_claim, "c"), "c", 3600)):
        assert violations(job["spec"]["template"]) == []
    assert violations(download(hostPath={"path": "/m", "nodes": ["n"]})["spec"]["template"]) != []


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_pods_of_the_chart_are_restricted(helm: Helm, variant: str) -> None:
    objects = helm.template(*VARIANTS[variant])
    for pod in (*map(pod_of, of_kind(objects, "Deployment")), only(objects, "Pod")):
        assert violations(pod) == []
        for container in pod["spec"]["containers"]:
            assert container["securityContext"]["readOnlyRootFilesystem"] is True


def test_the_namespace_of_the_manifests_enforces_restricted() -> None:
    namespace = yaml.safe_load((ROOT / "manifests" / "namespace.yaml").read_text())
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    deployment, *_ = yaml.safe_load_all((ROOT / "manifests" / "operator.yaml").read_text())
    assert violations(pod_of(deployment)) == []


def at(*path: str | int, value: Any) -> Callable[[Object], None]:
    """A function that sets a value at a path of a pod's spec."""

    def change(spec: Any) -> None:
        for step in path[:-1]:
            spec = spec[step]
        if value is None:
            del spec[path[-1]]
        else:
            spec[path[-1]] = value

    return change


CONTEXT = ("containers", 0, "securityContext")


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (at("hostNetwork", value=True), "hostNetwork"),
        (at("securityContext", "runAsUser", value=0), "securityContext.runAsUser"),
        (at("securityContext", "runAsNonRoot", value=None), "containers[megatron].runAsNonRoot"),
        (at("securityContext", "seccompProfile", value=None), "containers[megatron].seccompProfile"),
        (at("securityContext", "seccompProfile", "type", value="Unconfined"), "securityContext.seccompProfile.type"),
        (at("securityContext", "sysctls", value=[{"name": "kernel.msgmax"}]), "securityContext.sysctls[kernel.msgmax]"),
        (at("securityContext", "seLinuxOptions", value={"type": "spc_t"}), "securityContext.seLinuxOptions"),
        (at("volumes", 0, value={"name": "v", "hostPath": {"path": "/"}}), "volumes[v].hostPath"),
        (at(*CONTEXT, "privileged", value=True), "containers[megatron].privileged"),
        (at(*CONTEXT, "allowPrivilegeEscalation", value=None), "containers[megatron].allowPrivilegeEscalation"),
        (at(*CONTEXT, "capabilities", "drop", value=["NET_RAW"]), "containers[megatron].capabilities.drop"),
        (at(*CONTEXT, "capabilities", "add", value=["SYS_ADMIN"]), "containers[megatron].capabilities.add"),
        (at(*CONTEXT, "procMount", value="Unmasked"), "containers[megatron].procMount"),
        (at(*CONTEXT, "runAsNonRoot", value=False), "containers[megatron].runAsNonRoot"),
        (at("containers", 0, "ports", 0, "hostPort", value=80), "containers[megatron].ports.hostPort"),
        (at("containers", 0, "livenessProbe", "httpGet", "host", value="h"), "containers[megatron].livenessProbe.host"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_violations_of_the_level_are_found(change: Callable[[Object], None], found: str) -> None:
    pod = deepcopy(model_pod())
    change(pod["spec"])
    assert found in violations(pod)
