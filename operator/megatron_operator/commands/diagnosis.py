"""Checks of a cluster's prerequisites, from API objects. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from megatron_operator.api.crd import crd
from megatron_operator.api.quantity import Quantity
from megatron_operator.api.v1alpha1 import API_VERSION, KIND, VERSION, Device
from megatron_operator.commands.errors import INSTALL
from megatron_operator.kubernetes.lease import LeaseName
from megatron_operator.kubernetes.node_status import node_is_ready
from megatron_operator.settings import LEASE_VARIABLE

Object = Mapping[str, Any]

VALIDATIONS = "x-kubernetes-validations"
BROKEN_RULE = "spec.pods.ranksPerPod: "
RULE_BREAKER: Object = {
    "apiVersion": API_VERSION,
    "kind": KIND,
    "metadata": {"name": "doctor"},
    "spec": {"model": {"source": {"path": "/"}}, "pods": {"device": Device.CPU.value, "ranksPerPod": 2}},
}
"""A resource that breaks one rule only, the one whose message begins with BROKEN_RULE."""
DEFAULT_CLASS = "storageclass.kubernetes.io/is-default-class"
ENFORCED = "pod-security.kubernetes.io/enforce"


class Level(StrEnum):
    """Severity. Only a missing prerequisite prevents serving."""

    OK = "ok"
    WARN = "warn"
    MISSING = "missing"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Finding:
    """The result of one check, and its fix."""

    level: Level
    subject: str
    words: str
    fix: str = ""


def api_server(version: Object) -> Finding:
    """The version of Kubernetes."""
    return Finding(Level.OK, "API server", str(version.get("gitVersion")))


def rules(*, enforced: bool) -> Finding:
    """Whether the API server enforces the CEL rules of the CRD."""
    if enforced:
        return Finding(Level.OK, "rules", "kubectl apply rejects a resource that breaks a CEL rule of the definition")
    words = "kubectl apply accepts a resource that breaks a CEL rule; the operator rejects it in a condition"
    return Finding(Level.WARN, "rules", words, f"Kubernetes 1.25 or newer enforces the rules; {INSTALL}")


def definition(found: Object | None) -> Finding:
    """Whether the CRD is installed, with the schema of this version.

    A CRD without any CEL rule counts as equal, since `rules` reports that.
    """
    subject = "definition"
    if found is None:
        return Finding(Level.MISSING, subject, "MegatronInference is not defined", INSTALL)
    conditions = (found.get("status") or {}).get("conditions") or []
    if not any(each["type"] == "Established" and each["status"] == "True" for each in conditions):
        words = "; ".join(str(each.get("message")) for each in conditions if each["status"] == "False")
        return Finding(Level.MISSING, subject, f"it is not established: {words}", "fix the cause, or apply it again")
    served = [each for each in found["spec"]["versions"] if each["name"] == VERSION and each.get("served")]
    if not served:
        return Finding(Level.MISSING, subject, f"version {VERSION} is not served", INSTALL)
    ours, theirs = crd()["spec"]["versions"][0]["schema"], served[0].get("schema")
    if theirs == _without_rules(theirs):
        ours = _without_rules(ours)
    if (place := first_difference(ours, theirs)) is not None:
        words = f"its schema differs from this version; the first difference is at {place}"
        return Finding(
            Level.WARN, subject, words, "use the same version of the operator, the definition and this command"
        )
    return Finding(Level.OK, subject, f"MegatronInference {VERSION}, with the schema of this version")


def first_difference(ours: Any, theirs: Any, place: str = "") -> str | None:
    """The dotted path of the first difference; None when both are equal."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key in sorted(ours.keys() | theirs.keys()):
            below = place if key in ("properties", "openAPIV3Schema", "items") else f"{place}.{key}".lstrip(".")
            if (found := first_difference(ours.get(key), theirs.get(key), below)) is not None:
                return found
        return None
    return None if ours == theirs else place or "the root"


def _without_rules(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: _without_rules(value) for key, value in node.items() if key != VALIDATIONS}
    return [_without_rules(each) for each in node] if isinstance(node, list) else node


def operators(deployments: Sequence[Object], namespace: str, version: str) -> Iterator[Finding]:
    """Whether exactly one operator watches the namespace."""
    subject = "operator"
    if not deployments:
        words = "the cluster has no Deployment of it (an operator outside the cluster is not visible)"
        yield Finding(Level.MISSING, subject, words, INSTALL)
        return
    attentive = [each for each in deployments if not (only := watched(each)) or namespace in only]
    if not attentive:
        listed = ", ".join(sorted({name for each in deployments for name in watched(each)}))
        words = f"it watches {listed}, but not {namespace}"
        yield Finding(Level.MISSING, subject, words, f"add {namespace} to the chart's value `namespaces`")
    if len(attentive) > 1:
        both = " and ".join(full_name(each) for each in attentive)
        yield Finding(Level.WARN, subject, f"{both} both watch {namespace}", "remove all but one")
    for each in attentive:
        yield deployed(subject, each, version)


def full_name(obj: Object) -> str:
    """Namespace and name."""
    return f"{obj['metadata']['namespace']}/{obj['metadata']['name']}"


def watched(deployment: Object) -> tuple[str, ...]:
    """The namespaces that an operator is restricted to; empty for all namespaces."""
    arguments: list[str] = _container(deployment).get("args") or []
    return tuple(each.removeprefix("--namespace=") for each in arguments if each.startswith("--namespace="))


def lease_of(deployment: Object) -> LeaseName | None:
    """The Lease that an operator uses for leader election; None without one, or when it is configured elsewhere."""
    container = _container(deployment)
    values = {"metadata.namespace": deployment["metadata"]["namespace"]}
    for each in container.get("env") or []:
        text = each.get("value") or values.get(_field(each), "")
        values[each["name"]] = re.sub(r"\$\((\w+)\)", lambda match: values.get(match[1], match[0]), text)
    flags = [each for each in container.get("args") or [] if each.startswith("--lease=")]
    told = flags[-1].removeprefix("--lease=") if flags else values.get(LEASE_VARIABLE)
    try:
        return LeaseName.parse(told) if told else None
    except ValueError:
        return None


def _field(variable: Object) -> str:
    return str(((variable.get("valueFrom") or {}).get("fieldRef") or {}).get("fieldPath"))


def deployed(subject: str, deployment: Object, version: str) -> Finding:
    """Whether a pod of the Deployment is available, in this version."""
    status, image = deployment.get("status") or {}, str(_container(deployment).get("image"))
    desired, available = int(deployment["spec"].get("replicas", 1)), int(status.get("availableReplicas") or 0)
    name = full_name(deployment)
    if available < 1:
        said = [each.get("message") for each in status.get("conditions") or [] if each.get("status") == "False"]
        words = f"{name}: {available} of {desired} pods are available{': ' if said else ''}{'; '.join(map(str, said))}"
        where = deployment["metadata"]
        fix = f"kubectl -n {where['namespace']} describe deployment {where['name']}"
        return Finding(Level.MISSING, subject, words, fix if desired else f"scale {name} to 1")
    tag = image.rpartition(":")[2] if ":" in image.rpartition("/")[2] else ""
    if tag and tag != version and "@" not in image:
        return Finding(Level.WARN, subject, f"{name} runs as {image}; this command is {version}", "use one version")
    return Finding(Level.OK, subject, f"{name} runs as {image}")


def _container(deployment: Object) -> Object:
    containers: Sequence[Object] = deployment["spec"]["template"]["spec"]["containers"]
    return next((each for each in containers if each["name"] == "operator"), containers[0])


def rights(account: str, denied: Sequence[str], component: str = "operator", fix: str = INSTALL) -> Finding:
    """``denied`` are the missing rights, as text."""
    if not denied:
        return Finding(Level.OK, "permissions", f"{account} has all rights that the {component} needs")
    return Finding(Level.MISSING, "permissions", f"{account} may not {', '.join(denied)}", fix)


def gpus(nodes: Sequence[Object], asked: Iterable[str], resources_on_cpu: bool) -> Iterator[Finding]:
    """``asked`` are the GPU resources that the models of the namespace request."""
    ready = [node for node in nodes if node_is_ready(node)]
    if not ready:
        yield Finding(Level.MISSING, "nodes", f"none of {len(nodes)} nodes is ready", "see kubectl get nodes")
        return
    yield Finding(Level.OK, "nodes", f"{len(ready)} of {len(nodes)} are ready")
    wanted = list(dict.fromkeys(asked))
    for name in wanted or ["nvidia.com/gpu"]:
        offered = {node["metadata"]["name"]: _offered(node, name) for node in ready}
        total, most = sum(offered.values()), max(offered.values())
        if total:
            yield Finding(
                Level.OK, "GPUs", f"{total} {name} on {sum(map(bool, offered.values()))} nodes, at most {most} on one"
            )
        elif wanted:
            words = f"no node offers {name}, which models in this namespace request"
            yield Finding(Level.MISSING, "GPUs", words, "install the device plugin, or set spec.pods.device: cpu")
        elif not resources_on_cpu:
            words = f"no node offers {name}: only models with spec.pods.device: cpu can be scheduled"
            yield Finding(Level.WARN, "GPUs", words, "install the device plugin of the GPUs' vendor")
        else:
            yield Finding(Level.OK, "GPUs", f"no node offers {name}, and no model in this namespace requests it")


def _offered(node: Object, name: str) -> int:
    return int(Quantity(str(((node.get("status") or {}).get("allocatable") or {}).get(name, 0))))


def runtime_classes(present: Sequence[str], asked: Iterable[str]) -> Finding:
    """``asked`` are the RuntimeClasses that the models of the namespace use."""
    listed = ", ".join(present) or "none"
    if absent := sorted(set(asked) - set(present)):
        words = f"models in this namespace use {', '.join(absent)}; the cluster has: {listed}"
        return Finding(Level.MISSING, "RuntimeClass", words, "create it, or correct pods.runtimeClassName")
    return Finding(Level.OK, "RuntimeClass", f"has those that models in this namespace use; the cluster has: {listed}")


def storage(classes: Sequence[Object]) -> Finding:
    """Whether a claim without a class gets a StorageClass."""
    names = [each["metadata"]["name"] for each in classes]
    default = [
        each["metadata"]["name"]
        for each in classes
        if (each["metadata"].get("annotations") or {}).get(DEFAULT_CLASS) == "true"
    ]
    if default:
        return Finding(Level.OK, "StorageClass", f"the default is {default[0]}; the cluster has: {', '.join(names)}")
    words = f"none is the default; the cluster has: {', '.join(names) or 'none'}"
    return Finding(Level.WARN, "StorageClass", words, "claims for models must name a class or a volume")


def claim(name: str, found: Object | None) -> Finding:
    """A claim that a model of the namespace uses."""
    subject = f"claim {name}"
    if found is None:
        return Finding(
            Level.MISSING, subject, "does not exist, and a model in this namespace uses it", f"create the claim {name}"
        )
    phase = (found.get("status") or {}).get("phase")
    if phase != "Bound":
        words = f"is {phase}: not bound to a volume yet"
        return Finding(Level.WARN, subject, words, f"see kubectl describe pvc {name}")
    return Finding(Level.OK, subject, "is bound")


def secret(name: str, keys: Sequence[str], found: Object | None) -> Finding:
    """A Secret that models of the namespace use, with the keys that they need."""
    subject = f"Secret {name}"
    if found is None:
        words = "does not exist, and a model in this namespace uses it"
        return Finding(Level.MISSING, subject, words, f"create it: kubectl create secret generic {name} --help")
    there = found.get("data") or {}
    if absent := sorted(set(keys) - there.keys()):
        present = ", ".join(sorted(there)) or "nothing"
        words = f"has no {', '.join(absent)}, which a model in this namespace uses; it has: {present}"
        return Finding(Level.MISSING, subject, words, f"add the key, or use another one: kubectl edit secret {name}")
    return Finding(Level.OK, subject, "has the keys that models in this namespace use")


def pod_security(namespace: str, found: Object | None) -> Finding:
    """Whether Pod Security admits the pods."""
    if found is None:
        return Finding(
            Level.MISSING, "namespace", f"{namespace} does not exist", f"kubectl create namespace {namespace}"
        )
    level = (found["metadata"].get("labels") or {}).get(ENFORCED)
    words = f"level {level} is enforced" if level else "no level is enforced"
    return Finding(Level.OK, "Pod Security", f"{words} in {namespace}; the pods comply with `restricted`")


def kueue(groups: Iterable[str]) -> Finding:
    """Whether Kueue is installed."""
    words = "is installed" if "kueue.x-k8s.io" in groups else "is not installed; it is optional"
    return Finding(Level.OK, "Kueue", words)


NETWORK_POLICIES = Finding(
    Level.UNKNOWN,
    "NetworkPolicy",
    "no API shows whether the network plugin enforces policies",
    "see the documentation of the network plugin",
)
