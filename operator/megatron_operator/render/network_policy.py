"""The NetworkPolicy for connections to the pods of a resource. Outgoing connections are not restricted."""

from __future__ import annotations

from typing import Any

from megatron_operator import names
from megatron_operator.api.v1alpha1 import MegatronInference
from megatron_operator.render.metadata import child_metadata
from megatron_operator.settings import NetworkPolicies, Settings

OPERATOR = {"app.kubernetes.io/name": "megatron-operator"}
"""Labels of the operator's own pod, in the chart and in manifests/."""
NAMESPACE_NAME = "kubernetes.io/metadata.name"
"""Label that the API server sets on every namespace, from 1.21 on."""

Json = dict[str, Any]


def network_policy(resource: MegatronInference, settings: Settings) -> Json | None:
    """Clients reach the HTTP port, the operator the control port, Prometheus the metrics, and the pods each other.

    Clients are those of ``spec.expose.clientsFrom``, or else those of the settings, or else everyone. Network plugins
    always admit the kubelet, so the probes need no rule. None when network policies are disabled.
    """
    allowed = settings.network_policies
    if allowed is None:
        return None
    ours = {names.NAME_LABEL: resource.name}
    operator = {
        "namespaceSelector": {"matchLabels": {NAMESPACE_NAME: allowed.operator_namespace}},
        "podSelector": {"matchLabels": OPERATOR},
    }
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": child_metadata(resource, names.network_policy(resource.name)),
        "spec": {
            "podSelector": {"matchLabels": ours},
            "policyTypes": ["Ingress"],
            "ingress": [
                {**_clients(resource, allowed), "ports": [_port(names.HTTP_PORT)]},
                {"from": [{"podSelector": {"matchLabels": ours}}], **_among_pods(resource)},
                {"from": [operator], "ports": [_port(names.CONTROL_PORT)]},
                *_metrics(allowed),
            ],
        },
    }


def _clients(resource: MegatronInference, allowed: NetworkPolicies) -> Json:
    peers = resource.spec.expose.clients_from
    if peers is None:
        return {"from": list(allowed.clients_from)} if allowed.clients_from else {}
    return {"from": [peer.model_dump(mode="json", by_alias=True, exclude_unset=True) for peer in peers]}


def _metrics(allowed: NetworkPolicies) -> list[Json]:
    """No rule without peers, because a rule without peers admits all."""
    peers = list(allowed.metrics_from)
    return [{"from": peers, "ports": [_port(names.METRICS_PORT)]}] if peers else []


def _among_pods(resource: MegatronInference) -> Json:
    """Ports among the pods. Ranks of a group over several pods use ephemeral ports, so all ports are open there."""
    return {"ports": [_port(names.COORDINATOR_PORT)]} if resource.spec.pods_per_group == 1 else {}


def _port(number: int) -> Json:
    return {"protocol": "TCP", "port": number}
