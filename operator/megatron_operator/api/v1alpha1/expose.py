"""``spec.expose``: how clients reach the HTTP frontend, within the cluster and from outside."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from megatron_operator.api.v1alpha1.base import AbsolutePath, DnsName, HostName, Part


class ServiceType(StrEnum):
    """Types of a Kubernetes Service that reaches pods."""

    CLUSTER_IP = "ClusterIP"
    NODE_PORT = "NodePort"
    LOAD_BALANCER = "LoadBalancer"


class ServiceExposure(Part):
    """The HTTP Service."""

    type: ServiceType = ServiceType.CLUSTER_IP
    """ClusterIP, NodePort or LoadBalancer."""


class IngressExposure(Part):
    """An Ingress that leads to the HTTP Service."""

    class_name: DnsName | None = None
    """IngressClass that serves it; the cluster's default one when left out."""
    host: HostName | None = None
    """DNS name that clients ask for, like chat.example.com or *.example.com; any name when left out."""
    path: AbsolutePath = "/"
    """Beginning of the paths that are led on, unchanged: / for all, /v1 for the API without the page."""
    tls_secret: DnsName | None = None
    """Secret of type kubernetes.io/tls with the host's certificate; HTTP without encryption when left out."""
    annotations: dict[str, str] = Field(default={})
    """Annotations of the Ingress, by which controllers are told more: most end an answer that takes longer than a
    minute, or keep a streamed one back, unless an annotation of theirs says otherwise."""


class Expose(Part):
    """How clients reach the HTTP frontend."""

    service: ServiceExposure = ServiceExposure()
    """The HTTP Service, named like the resource, port 8000."""
    ingress: IngressExposure | None = None
    """An Ingress, named like the resource, that leads to the HTTP Service; none when left out."""
