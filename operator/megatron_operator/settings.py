"""Settings of the operator that apply to all resources."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Self

IMAGE_VARIABLE = "MEGATRON_RUNTIME_IMAGE"
DEVICE_PLACEHOLDER = "{device}"
DEFAULT_IMAGE = f"localhost/megatron-inference/runtime:{version('megatron-inference')}-{DEVICE_PLACEHOLDER}"
"""Below ``localhost/``, so that no node pulls it from a registry: it has to be loaded into the nodes."""

NETWORK_POLICIES_VARIABLE = "MEGATRON_NETWORK_POLICIES"
OPERATOR_NAMESPACE_VARIABLE = "MEGATRON_OPERATOR_NAMESPACE"
LEASE_VARIABLE = "MEGATRON_OPERATOR_LEASE"
LEASE_SECONDS_VARIABLE = "MEGATRON_OPERATOR_LEASE_SECONDS"
WATCH_SILENCE_VARIABLE = "MEGATRON_OPERATOR_WATCH_SILENCE"
MAX_CONCURRENT_UPGRADES_VARIABLE = "MEGATRON_FLEET_ROLLOUT_MAX_CONCURRENT"
DISRUPTION_BUDGETS_VARIABLE = "MEGATRON_POD_DISRUPTION_BUDGETS"
MODEL_CACHES_VARIABLE = "MEGATRON_MODEL_CACHES"
CACHE_RETENTION_VARIABLE = "MEGATRON_MODEL_CACHE_RETENTION"
ACTIVATOR_VARIABLE = "MEGATRON_ACTIVATOR"
METRICS_FROM_VARIABLE = "MEGATRON_METRICS_FROM"
CLIENTS_FROM_VARIABLE = "MEGATRON_CLIENTS_FROM"


@dataclass(frozen=True)
class NetworkPolicies:
    """Which peers reach the ports of pods, besides the kubelet and the pods of the same resource."""

    operator_namespace: str
    """Namespace of the operator's own pod."""
    metrics_from: tuple[Mapping[str, Any], ...] = ()
    """Peers that scrape ``/metrics``, as in a NetworkPolicy."""
    clients_from: tuple[Mapping[str, Any], ...] = ()
    """Clients of the HTTP port of resources without ``spec.expose.clientsFrom``; empty for everyone."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Self | None:
        """None unless enabled. Raises ValueError with variable, value and fix."""
        if not _is_enabled(environment, NETWORK_POLICIES_VARIABLE, "false"):
            return None
        namespace = environment.get(OPERATOR_NAMESPACE_VARIABLE, "")
        if not namespace:
            fix = "set it to the namespace of the operator's pod, which the policies would block otherwise"
            raise ValueError(f"{OPERATOR_NAMESPACE_VARIABLE}: is missing; {fix}")
        return cls(namespace, _peers(environment, METRICS_FROM_VARIABLE), _peers(environment, CLIENTS_FROM_VARIABLE))


def _peers(environment: Mapping[str, str], variable: str) -> tuple[Mapping[str, Any], ...]:
    text = environment.get(variable, "[]")
    try:
        peers = json.loads(text)
    except ValueError:
        peers = None
    if not isinstance(peers, list) or not all(isinstance(peer, dict) and peer for peer in peers):
        fix = "set it to a JSON list of peers as in spec.ingress.from of a NetworkPolicy"
        raise ValueError(f"{variable}: {text!r} is not such a list; {fix}")
    return tuple(peers)


@dataclass(frozen=True)
class Settings:
    """Defaults for fields that a resource leaves out, and options for its children."""

    image: str = DEFAULT_IMAGE
    """Image of the runtime for resources without ``spec.image``; ``{device}`` stands for their ``spec.pods.device``."""
    network_policies: NetworkPolicies | None = None
    """None to create no NetworkPolicies."""
    max_concurrent_upgrades: int = 1
    """Resources whose pods are replaced at a time because the default image has changed; 0 for none."""
    disruption_budgets: bool = True
    """Whether resources get a PodDisruptionBudget."""
    model_caches: bool = True
    """Whether models are downloaded into caches where resources ask for it."""
    cache_retention: int = 3600
    """Seconds that a model stays in a shared cache after its last use."""
    has_activator: bool = False
    """Whether there is an activator, which starts models that were stopped because they were idle."""
    has_spare_nodes: bool = True
    """Whether there may be room for a replica group besides the running ones."""

    def default_image(self, device: str) -> str:
        """Image of the runtime for resources without ``spec.image`` on this device."""
        return self.image.replace(DEVICE_PLACEHOLDER, device)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Self:
        """Read the variables above. Raises ValueError with variable, value and fix."""
        return cls(
            image=environment.get(IMAGE_VARIABLE) or DEFAULT_IMAGE,
            network_policies=NetworkPolicies.from_environment(environment),
            max_concurrent_upgrades=_count(environment, MAX_CONCURRENT_UPGRADES_VARIABLE, 1),
            has_activator=_is_enabled(environment, ACTIVATOR_VARIABLE, "false"),
            model_caches=_is_enabled(environment, MODEL_CACHES_VARIABLE, "true"),
            cache_retention=_count(environment, CACHE_RETENTION_VARIABLE, 3600),
            disruption_budgets=_is_enabled(environment, DISRUPTION_BUDGETS_VARIABLE, "true"),
        )


def _count(environment: Mapping[str, str], variable: str, default: int) -> int:
    text = environment.get(variable) or str(default)
    if not text.isdecimal():
        raise ValueError(f"{variable}: {text!r} is not a count; set it to a whole number like {default}")
    return int(text)


def _is_enabled(environment: Mapping[str, str], variable: str, default: str) -> bool:
    text = environment.get(variable, default)
    if text not in ("true", "false"):
        raise ValueError(f"{variable}: {text!r} is neither; set it to true or false")
    return text == "true"
