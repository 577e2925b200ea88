"""``spec.expose``: how clients reach the HTTP frontend, inside the cluster and from outside."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Self

from pydantic import ConfigDict, Field, model_validator

from megatron_operator.api.quantity import Duration
from megatron_operator.api.v1alpha1.base import (
    AbsolutePath,
    Cidr,
    DnsName,
    HostName,
    Integer,
    LabelKey,
    LabelValue,
    Part,
    misplaced,
)


class ServiceType(StrEnum):
    """Types of a Kubernetes Service with pods behind it."""

    CLUSTER_IP = "ClusterIP"
    NODE_PORT = "NodePort"
    LOAD_BALANCER = "LoadBalancer"


class ServiceExposure(Part):
    """The HTTP Service."""

    type: ServiceType = ServiceType.CLUSTER_IP
    """ClusterIP, NodePort or LoadBalancer."""
    annotations: dict[str, str] = Field(default={})
    """Annotations of the HTTP Service, such as those by which a cloud provider makes a load balancer internal. One that
    is removed here is removed from the Service."""


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


class FailureMode(StrEnum):
    """What a gateway does with a request when the endpoint picker does not answer."""

    FAIL_CLOSE = "FailClose"
    FAIL_OPEN = "FailOpen"


class EndpointPicker(Part):
    """The Service of an endpoint picker, which chooses a pod for each request."""

    name: DnsName
    """Name of the Service, in the resource's namespace."""
    port: Annotated[Integer, Field(ge=1, le=65535)] = 9002
    """Port of the Service."""
    failure_mode: FailureMode = FailureMode.FAIL_CLOSE
    """What the gateway does with a request when the picker does not answer: FailClose rejects it, FailOpen sends it to
    any pod."""


class InferencePoolExposure(Part):
    """An InferencePool of the Gateway API Inference Extension for the pods with an HTTP frontend."""

    endpoint_picker: EndpointPicker
    """The endpoint picker of the pool. The operator does not install it."""
    annotations: dict[str, str] = Field(default={})
    """Annotations of the InferencePool."""


class SelectorOperator(StrEnum):
    """How a requirement of a label selector compares the label."""

    IN = "In"
    NOT_IN = "NotIn"
    EXISTS = "Exists"
    DOES_NOT_EXIST = "DoesNotExist"


class SelectorRequirement(Part):
    """A requirement of a label selector."""

    model_config = ConfigDict(
        json_schema_extra={
            "x-kubernetes-validations": [
                {
                    "rule": "(self.operator in ['In', 'NotIn']) == (has(self.values) && self.values.size() > 0)",
                    "message": "spec.expose.clientsFrom: In and NotIn need values, Exists and DoesNotExist have none;"
                    " set an operator that fits",
                }
            ]
        }
    )

    key: LabelKey
    """Label that it compares."""
    operator: SelectorOperator
    """In, NotIn, Exists or DoesNotExist."""
    values: list[LabelValue] = Field(default=[], max_length=32)
    """Values for In and NotIn."""

    @model_validator(mode="after")
    def _values_fit_the_operator(self) -> Self:
        compares = self.operator in (SelectorOperator.IN, SelectorOperator.NOT_IN)
        if compares is not bool(self.values):
            fix = "add at least one" if compares else "remove them"
            raise misplaced("values", self.values, f"do not fit operator {self.operator.value}; {fix}")
        return self


class LabelSelector(Part):
    """Labels of pods or namespaces; an empty one selects all."""

    match_labels: dict[str, LabelValue] = Field(default={})
    """Labels and their values."""
    match_expressions: list[SelectorRequirement] = Field(default=[], max_length=16)
    """Further requirements, all of which must hold."""


class IPBlock(Part):
    """A range of addresses."""

    cidr: Cidr
    """The range, like 10.0.0.0/8."""
    except_: list[Cidr] = Field(default=[], max_length=32, alias="except")
    """Parts of the range to leave out."""


class NetworkPolicyPeer(Part):
    """Pods, namespaces or addresses, as in a NetworkPolicy."""

    model_config = ConfigDict(
        json_schema_extra={
            "x-kubernetes-validations": [
                {
                    "rule": "has(self.ipBlock) != (has(self.podSelector) || has(self.namespaceSelector))",
                    "message": "spec.expose.clientsFrom: set either ipBlock, or podSelector and namespaceSelector",
                }
            ]
        }
    )

    pod_selector: LabelSelector | None = None
    """Pods, in the namespaces of namespaceSelector, or in the resource's namespace without one."""
    namespace_selector: LabelSelector | None = None
    """Namespaces; without podSelector all pods in them."""
    ip_block: IPBlock | None = None
    """Addresses, instead of pods."""

    @model_validator(mode="after")
    def _selects_pods_or_addresses(self) -> Self:
        pods = self.pod_selector is not None or self.namespace_selector is not None
        if pods and self.ip_block is not None:
            raise misplaced("ipBlock", self.ip_block.cidr, "excludes podSelector and namespaceSelector; remove one")
        if not pods and self.ip_block is None:
            message = "selects no peer; set ipBlock, podSelector or namespaceSelector"
            raise misplaced("", {}, message)
        return self


class Expose(Part):
    """How clients reach the HTTP frontend."""

    service: ServiceExposure = ServiceExposure()
    """The HTTP Service, named like the resource, with port 8000."""
    ingress: IngressExposure | None = None
    """An Ingress for the HTTP Service, named like the resource. Default: none."""
    http_route: HTTPRouteExposure | None = None
    """An HTTPRoute for the HTTP Service, named like the resource. Default: none. It requires the Gateway API 1.2 or
    newer. A cluster without it still serves the model, and the condition Degraded says what is missing."""
    inference_pool: InferencePoolExposure | None = None
    """An InferencePool named like the resource, to which httpRoute sends the requests instead of the HTTP Service, so
    that an endpoint picker chooses the pods. Default: none. It requires the Gateway API Inference Extension 1.0 or
    newer. A cluster without it still serves the model, and the condition Degraded says what is missing."""
    clients_from: Annotated[list[NetworkPolicyPeer], Field(min_length=1, max_length=32)] | None = None
    """Clients that may connect to the HTTP port, as in a NetworkPolicy, such as the namespace of the ingress
    controller. Default: networkPolicy.clientsFrom of the operator's chart, which is everyone unless set. It requires
    networkPolicy.enabled of the chart, and a network plugin that enforces NetworkPolicies."""
