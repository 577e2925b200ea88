"""``spec.expose``: how clients reach the HTTP frontend, within the cluster and from outside."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from megatron_operator.api.quantity import Duration
from megatron_operator.api.v1alpha1.base import AbsolutePath, DnsName, HostName, Integer, Part


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


class ParentRef(Part):
    """A Gateway that a route is attached to."""

    name: DnsName
    """Name of the Gateway."""
    namespace: Annotated[DnsName, Field(max_length=63)] | None = None
    """Namespace of the Gateway, whose listeners must allow routes from the resource's one; that one when left out."""
    section_name: DnsName | None = None
    """Listener of the Gateway; all that fit when left out."""
    port: Annotated[Integer, Field(ge=1, le=65535)] | None = None
    """Port of the Gateway's listeners; any when left out."""


class HTTPRouteExposure(Part):
    """An HTTPRoute of the Gateway API that leads to the HTTP Service."""

    parent_refs: Annotated[list[ParentRef], Field(min_length=1, max_length=32)]
    """Gateways that it is attached to."""
    hostnames: list[HostName] = Field(default=[], max_length=16)
    """DNS names that clients ask for, like chat.example.com or *.example.com; when left out, those of the Gateways'
    listeners."""
    path: AbsolutePath = "/"
    """Beginning of the paths that are led on, unchanged: / for all, /v1 for the API without the page."""
    request_timeout: Duration = Duration("0s")
    """Time after which the gateway ends an answer, however much of it has been streamed. 0s: never."""
    annotations: dict[str, str] = Field(default={})
    """Annotations of the HTTPRoute."""


class Expose(Part):
    """How clients reach the HTTP frontend."""

    service: ServiceExposure = ServiceExposure()
    """The HTTP Service, named like the resource, port 8000."""
    ingress: IngressExposure | None = None
    """An Ingress, named like the resource, that leads to the HTTP Service; none when left out."""
    http_route: HTTPRouteExposure | None = None
    """An HTTPRoute, named like the resource, that leads to the HTTP Service; none when left out. It needs the Gateway
    API from version 1.2 on; a cluster without it serves the model all the same, and Degraded says what is missing."""
