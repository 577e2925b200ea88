"""``spec.expose``: how clients reach the HTTP frontend, inside the cluster and from outside."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from megatron_operator.api.quantity import Duration
from megatron_operator.api.v1alpha1.base import AbsolutePath, DnsName, HostName, Integer, Part


class ServiceType(StrEnum):
    """Types of a Kubernetes Service with pods behind it."""

    CLUSTER_IP = "ClusterIP"
    NODE_PORT = "NodePort"
    LOAD_BALANCER = "LoadBalancer"


class ServiceExposure(Part):
    """The HTTP Service."""

    type: ServiceType = ServiceType.CLUSTER_IP
    """ClusterIP, NodePort or LoadBalancer."""


class IngressExposure(Part):
    """An Ingress for the HTTP Service."""

    class_name: DnsName | None = None
    """IngressClass that serves it. Default: the cluster's default class."""
    host: HostName | None = None
    """DNS name for clients, like chat.example.com or *.example.com. Default: any name."""
    path: AbsolutePath = "/"
    """Prefix of the paths to forward, unchanged: / for all, /v1 for the API without the page."""
    tls_secret: DnsName | None = None
    """Secret of type kubernetes.io/tls with the certificate of the host. Default: HTTP without encryption."""
    annotations: dict[str, str] = Field(default={})
    """Annotations of the Ingress, which configure its controller. By default, most controllers end an answer after a
    minute or buffer a streamed one."""


class ParentRef(Part):
    """A Gateway that the route is attached to."""

    name: DnsName
    """Name of the Gateway."""
    namespace: Annotated[DnsName, Field(max_length=63)] | None = None
    """Namespace of the Gateway; its listeners must allow routes from the resource's namespace. Default: the resource's
    namespace."""
    section_name: DnsName | None = None
    """Listener of the Gateway. Default: all listeners that match."""
    port: Annotated[Integer, Field(ge=1, le=65535)] | None = None
    """Port of the Gateway's listeners. Default: any port."""


class HTTPRouteExposure(Part):
    """An HTTPRoute of the Gateway API for the HTTP Service."""

    parent_refs: Annotated[list[ParentRef], Field(min_length=1, max_length=32)]
    """Gateways that the route is attached to."""
    hostnames: list[HostName] = Field(default=[], max_length=16)
    """DNS names for clients, like chat.example.com or *.example.com. Default: those of the Gateways' listeners."""
    path: AbsolutePath = "/"
    """Prefix of the paths to forward, unchanged: / for all, /v1 for the API without the page."""
    request_timeout: Duration = Duration("0s")
    """Time after which the gateway ends a request, even while it streams the answer. 0s: never."""
    annotations: dict[str, str] = Field(default={})
    """Annotations of the HTTPRoute."""


class Expose(Part):
    """How clients reach the HTTP frontend."""

    service: ServiceExposure = ServiceExposure()
    """The HTTP Service, named like the resource, with port 8000."""
    ingress: IngressExposure | None = None
    """An Ingress for the HTTP Service, named like the resource. Default: none."""
    http_route: HTTPRouteExposure | None = None
    """An HTTPRoute for the HTTP Service, named like the resource. Default: none. It requires the Gateway API 1.2 or
    newer. A cluster without it still serves the model, and the condition Degraded says what is missing."""
