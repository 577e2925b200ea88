"""The identity of this pod. An operator sets it in the environment; without one, the pod is standalone and leads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from megatron_runtime.errors import ConfigurationError
from megatron_runtime.wire.security import KEY_VARIABLE, SHORTEST_SECRET

TERMINATION_LOG_VARIABLE = "MEGATRON_TERMINATION_LOG"
"""The file to which a failing launcher writes the reason."""


class Lifecycle(StrEnum):
    """The desired state at start. The engines reach it before the pod is ready."""

    RUNNING = "Running"
    PAUSED = "Paused"
    SUSPENDED = "Suspended"


@dataclass(frozen=True)
class Identity:
    """The pod's role among the pods of one resource, and their shared secrets."""

    replica_group: int = 0
    """Index of the replica group: Megatron's data-parallel rank."""
    attempt: int = 0
    pod_index: int = 0
    is_leader: bool = True
    """Whether it leads at its start; an operator may move the role later."""
    leader_epoch: int = 0
    """The number of the decision that made it the leader."""
    lifecycle: Lifecycle = Lifecycle.RUNNING
    coordinator_address: str | None = None
    master_address: str | None = None
    """Address of the replica group's first pod, which has the first rank."""
    bind_host: str | None = None
    coordinator_key: str | None = None
    control_token: str | None = None
    api_keys_file: Path | None = None
    api_keys: tuple[str, ...] = ()
    """API keys that are in no file."""
    local_ranks: int | None = None
    """Ranks on this machine, including those of other launchers; they share its cores."""
    termination_log: Path | None = None

    @property
    def is_standalone(self) -> bool:
        """Whether this launcher is the only one of the service."""
        return self.coordinator_address is None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Identity:
        """Reads the ``MEGATRON_*`` variables; raises ConfigurationError naming the variable."""
        read = _Reader(environment)
        return cls(
            replica_group=read.integer("MEGATRON_REPLICA_GROUP", 0),
            attempt=read.integer("MEGATRON_ATTEMPT", 0),
            pod_index=read.integer("MEGATRON_POD_INDEX", 0),
            is_leader=read.flag("MEGATRON_LEADER", True),
            leader_epoch=read.integer("MEGATRON_LEADER_EPOCH", 0),
            lifecycle=read.lifecycle("MEGATRON_LIFECYCLE"),
            coordinator_address=read.text("MEGATRON_COORDINATOR_ADDRESS"),
            master_address=read.text("MEGATRON_MASTER_ADDR"),
            bind_host=read.text("MEGATRON_BIND_HOST"),
            coordinator_key=read.key(KEY_VARIABLE),
            control_token=read.text("MEGATRON_CONTROL_TOKEN"),
            api_keys_file=read.path("MEGATRON_API_KEYS_FILE"),
            local_ranks=read.integer("MEGATRON_LOCAL_RANKS", 0) or None,
            termination_log=read.path(TERMINATION_LOG_VARIABLE),
        )


class _Reader:
    """Typed access to environment variables; an empty one counts as absent."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment

    def text(self, name: str) -> str | None:
        return self._environment.get(name) or None

    def path(self, name: str) -> Path | None:
        value = self.text(name)
        return None if value is None else Path(value)

    def integer(self, name: str, default: int) -> int:
        value = self.text(name)
        if value is None:
            return default
        if not value.isdecimal():
            raise ConfigurationError(f"{name}={value}: must be a whole number of at least 0")
        return int(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.text(name)
        if value is None:
            return default
        if value not in ("0", "1"):
            raise ConfigurationError(f"{name}={value}: must be 1 or 0")
        return value == "1"

    def lifecycle(self, name: str) -> Lifecycle:
        value = self.text(name) or Lifecycle.RUNNING
        if value not in list(Lifecycle):
            raise ConfigurationError(f"{name}={value}: must be one of {', '.join(Lifecycle)}")
        return Lifecycle(value)

    def key(self, name: str) -> str | None:
        value = self.text(name)
        if value is not None and len(value) < SHORTEST_SECRET:
            raise ConfigurationError(
                f"{name}: {len(value)} characters are too few; use {SHORTEST_SECRET} random ones or more"
            )
        return value
