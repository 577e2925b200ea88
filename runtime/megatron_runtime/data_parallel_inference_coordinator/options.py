"""The options of a coordinator, in memory and as the JSON that its process is started with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Self

from megatron_runtime.config import DEFAULT_MAX_REQUESTS, PrefixCachingCoordinatorPolicy
from megatron_runtime.lifecycle import CoordinatorState
from megatron_runtime.setting_ranges import check_routing_alpha


class ServiceWeights(NamedTuple):
    """The weights that every engine of the service has to load."""

    version: int
    path: str


@dataclass(frozen=True)
class CoordinatorOptions:
    """The arguments of DataParallelInferenceCoordinator, by its names. Times are seconds.

    Raises:
        ConfigurationError: prefix_caching_routing_alpha is out of range.
    """

    data_parallel_size: int
    """Expected number of engines; more and fewer work too."""
    inference_coordinator_port: int | None = None
    """None, or a port that is in use, means any free port."""
    deterministic_mode: bool = False
    """Routes over the engines in the order of their replica groups, not of their registration."""
    block_size_tokens: int | None = None
    """Tokens per hashed block."""
    enable_prefix_caching: bool = False
    prefix_caching_coordinator_policy: PrefixCachingCoordinatorPolicy = (
        PrefixCachingCoordinatorPolicy.FIRST_PREFIX_BLOCK
    )
    schedule_output_path: str | None = None
    """File for the routing decisions, written when the coordinator ends."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    initial_state: CoordinatorState = CoordinatorState.RUNNING
    initial_weights: ServiceWeights | None = None
    """None: engines keep the weights that they start with."""
    request_timeout: float = 120.0
    """Time that a request waits while no engine is registered."""
    engine_timeout: float = 5.0
    """Time without a message after which an engine counts as lost."""
    prefix_caching_routing_alpha: float = 0.5
    """Weight of a known prefix against the load in prefix routing, 0 to 1."""
    max_requests: int = DEFAULT_MAX_REQUESTS
    """Number of requests with which an engine counts as full in prefix routing."""

    def __post_init__(self) -> None:
        check_routing_alpha(self.prefix_caching_routing_alpha)

    @property
    def hash_block_size(self) -> int:
        """Tokens per hashed block if prompts are hashed for routing, else 0."""
        ignoring = (PrefixCachingCoordinatorPolicy.ROUND_ROBIN, PrefixCachingCoordinatorPolicy.LOAD_BALANCED)
        if not self.enable_prefix_caching or self.prefix_caching_coordinator_policy in ignoring:
            return 0
        return self.block_size_tokens or 0

    def serialize(self) -> dict[str, Any]:
        """All fields as JSON values."""
        return {**asdict(self), "initial_state": self.initial_state.name}

    @classmethod
    def deserialize(cls, data: Mapping[str, Any]) -> Self:
        """The options that ``serialize`` was called on, also after a round trip through JSON."""
        policy, weights = data["prefix_caching_coordinator_policy"], data["initial_weights"]
        return cls(
            **{
                **data,
                "prefix_caching_coordinator_policy": PrefixCachingCoordinatorPolicy(policy),
                "initial_state": CoordinatorState[data["initial_state"]],
                "initial_weights": None if weights is None else ServiceWeights(*weights),
            }
        )


@dataclass(frozen=True)
class CoordinatorProcessOptions:
    """The options of ``coordinator_process``."""

    coordinator: CoordinatorOptions
    may_use_other_port: bool = False
    """Whether the process may listen on another port when the given one is in use."""
    publishes_key: bool = False
    """Whether clients of the same user find the key in a file."""

    def serialize(self) -> dict[str, Any]:
        """All fields as JSON values."""
        return {**asdict(self), "coordinator": self.coordinator.serialize()}

    @classmethod
    def deserialize(cls, data: Mapping[str, Any]) -> Self:
        """The options that ``serialize`` was called on, also after a round trip through JSON."""
        return cls(**{**data, "coordinator": CoordinatorOptions.deserialize(data["coordinator"])})
