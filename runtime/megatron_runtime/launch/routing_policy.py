"""The values of ``--routing-policy``."""

from __future__ import annotations

from megatron_runtime.config import PrefixCachingCoordinatorPolicy
from megatron_runtime.errors import ConfigurationError

PREFIX_POLICIES = ("first-prefix-block", "longest-prefix")
ROUTING_POLICIES = ("round-robin", "load-balanced", *PREFIX_POLICIES, "auto")


def check_routing_policy(policy: str, *, prefix_caching: bool) -> None:
    """Raise ConfigurationError for a policy that needs the prefix cache, without one."""
    if policy in PREFIX_POLICIES and not prefix_caching:
        raise ConfigurationError(
            f"--routing-policy {policy}: routes by cached prefixes, but --no-prefix-caching "
            "disables the cache; omit that flag, or use round-robin or load-balanced"
        )


def coordinator_policy(routing_policy: str, *, prefix_caching: bool) -> PrefixCachingCoordinatorPolicy:
    """The policy that a value of ``--routing-policy`` means; auto goes by prefixes where engines cache them."""
    if routing_policy == "auto":
        policy = PrefixCachingCoordinatorPolicy
        return policy.LONGEST_PREFIX if prefix_caching else policy.LOAD_BALANCED
    return PrefixCachingCoordinatorPolicy(routing_policy.replace("-", "_"))
