"""The options of ``megatron-serve``, checked as far as possible without the checkpoint."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path

from megatron_runtime.config import LOGPROBS_MODES, InferenceConfig
from megatron_runtime.errors import ConfigurationError
from megatron_runtime.launch.identity import Identity
from megatron_runtime.launch.lora_modules import check_modules
from megatron_runtime.launch.routing_policy import ROUTING_POLICIES, check_routing_policy
from megatron_runtime.model.cache_layout import StateMemory
from megatron_runtime.model.formats.checkpoint_path import model_name
from megatron_runtime.model.formats.quantized_weights import KeptKind, kept_kind
from megatron_runtime.parallel.layout import ParallelSizes
from megatron_runtime.parallel.timeouts import RENDEZVOUS_TIMEOUT
from megatron_runtime.processes.supervisor import HANG_SECONDS, RESET_SECONDS
from megatron_runtime.server.options import HttpOptions
from megatron_runtime.setting_ranges import check_routing_alpha, check_state_memory
from megatron_runtime.wire.security import KEY_VARIABLE, is_loopback

DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("cpu", "cuda")
KV_CACHE_MANAGEMENTS = ("persist", "offload", "recompute")
DRAFT_MODEL_FLAG = "--speculative-draft-model"
_NO_CHECKPOINT = "no such file or folder; give a .gguf file or a checkpoint folder"
HIGHEST_PORT = 65535
EVERY_ADDRESS = ("0.0.0.0", "::")
"""Wildcard addresses: valid to listen on, not to connect to."""
MIN_HANG_TIMEOUT = 3
"""Seconds; several heartbeats may be late."""


@dataclass(frozen=True)
class ModelSource:
    """Source of the checkpoint: a path, or a repository on the Hugging Face hub."""

    path: Path | None = None
    hf_repo: str | None = None
    hf_file: str | None = None
    """A GGUF file of the repository; None: the whole repository, in the format of transformers."""
    hf_revision: str | None = None

    @property
    def name(self) -> str:
        """The default name of the served model."""
        if self.hf_repo is not None:
            return self.hf_repo
        assert self.path is not None
        return model_name(self.path)

    @property
    def flag(self) -> str:
        """Its flag, for messages."""
        return f"--model {self.path}" if self.path is not None else f"--hf-repo {self.hf_repo}"


@dataclass(frozen=True)
class EngineOptions:
    """The engine of each replica group. Sizes are bytes; None lets the preflight choose."""

    dtype: str = "auto"
    quantized_weights: str = "expand"
    device: str = "cpu"
    max_sequence_length: int | None = None
    block_size_tokens: int = 16
    kv_cache_bytes: int | None = None
    kv_cache_dtype: str = InferenceConfig.kv_cache_dtype
    attention_backend: str = "auto"
    device_memory_bytes: int | None = None
    """Memory of each GPU, for the preflight; None: as nvidia-smi reports."""
    max_requests: int | None = None
    num_cuda_graphs: int | None = None
    """As of InferenceConfig; None: all sizes that the model permits on a GPU, and none on a CPU."""
    batch_invariant: bool = False
    num_speculative_tokens: int = 0
    speculative_draft_model: str | None = None
    """The checkpoint that drafts these tokens; None: they are copied from the request's earlier tokens."""
    mamba_memory_ratio: float | None = None
    prefix_caching: bool = True
    prefix_caching_mamba_gb: float | None = None
    chunked_prefill: bool = True
    kv_cache_management: str = "offload"
    offload_weights: bool = False
    logprobs_mode: str = "raw_logprobs"
    check_finite: bool = False
    moe_enable_routing_replay: bool = False
    lora_modules: tuple[tuple[str, str], ...] = ()
    """Names and folders of LoRA adapters."""
    max_loras: int = InferenceConfig.max_loras
    max_lora_rank: int = InferenceConfig.max_lora_rank
    grammar_cache_bytes: int = InferenceConfig.grammar_cache_bytes
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    expert_parallel: int = 1

    @property
    def kept_kind(self) -> KeptKind:
        """Which matrices that the checkpoint stores quantized stay so; ConfigurationError names the flag."""
        return kept_kind(self.quantized_weights, self.dtype, self.device, "--quantized-weights")

    @property
    def state_memory(self) -> StateMemory:
        """The settings for the memory of recurrent states."""
        snapshots = self.prefix_caching_mamba_gb if self.prefix_caching else None
        return StateMemory(self.mamba_memory_ratio, snapshots, are_flags=True)

    @property
    def parallel_sizes(self) -> dict[str, int]:
        """The sizes that divide a model, by the field names of `ParallelSizes`."""
        return {"tensor": self.tensor_parallel, "pipeline": self.pipeline_parallel, "expert": self.expert_parallel}

    @property
    def sizes(self) -> ParallelSizes:
        """The same, checked; ConfigurationError names the field."""
        return ParallelSizes(tensor=self.tensor_parallel, pipeline=self.pipeline_parallel, expert=self.expert_parallel)

    @property
    def of_draft_model(self) -> EngineOptions:
        """The same for the draft model, which is whole on each rank."""
        whole = replace(self, tensor_parallel=1, pipeline_parallel=1, expert_parallel=1, kv_cache_dtype="auto")
        return replace(whole, speculative_draft_model=None)

    @property
    def ranks_per_replica_group(self) -> int:
        """Ranks of one replica group, as in `ParallelSizes.ranks_per_replica_group`."""
        return max(self.tensor_parallel, self.expert_parallel) * self.pipeline_parallel


@dataclass(frozen=True)
class LaunchOptions:
    """One pod. Ports: None means the default port; a standalone pod uses a free one if that is in use."""

    model: ModelSource
    identity: Identity = field(default_factory=Identity)
    engine: EngineOptions = field(default_factory=EngineOptions)
    served_name: str | None = None
    replica_groups: int = 1
    ranks_per_pod: int | None = None
    """None: all ranks of a replica group."""
    threads_per_rank: int | None = None
    routing_policy: str = "auto"
    routing_alpha: float = 0.5
    frontend_replicas: int = 2
    request_timeout: float = 600.0
    http: HttpOptions = field(default_factory=HttpOptions)
    drain_timeout: float = 60.0
    max_restarts: int = 5
    restart_reset_after: float = RESET_SECONDS
    auto_suspend_after: float = 0.0
    """Seconds without a request; 0 disables the automatic suspension."""
    hang_timeout: float = HANG_SECONDS
    rendezvous_timeout: float = RENDEZVOUS_TIMEOUT
    host: str | None = None
    port: int | None = None
    control_port: int | None = None
    metrics_port: int | None = None
    coordinator_port: int | None = None

    @property
    def http_host(self) -> str:
        """The address that the OpenAI endpoint listens on: in a pod all addresses, since port-forwards use loopback."""
        if self.host is not None or is_loopback(self.private_host):
            return self.host or self.private_host
        return next(every for every in EVERY_ADDRESS if (":" in every) == (":" in self.private_host))

    @property
    def private_host(self) -> str:
        """The address that the control API and the coordinator listen on."""
        return self.identity.bind_host or "127.0.0.1"

    @property
    def model_name(self) -> str:
        """The name of the model in requests."""
        return self.served_name or self.model.name

    @property
    def local_ranks_per_replica_group(self) -> int:
        """Ranks that this pod runs for one replica group."""
        left = self.engine.ranks_per_replica_group - self.first_rank_in_replica_group
        return left if self.ranks_per_pod is None else min(self.ranks_per_pod, left)

    @property
    def first_rank_in_replica_group(self) -> int:
        """The first of this pod's ranks, counted within the replica group."""
        return self.identity.pod_index * (self.ranks_per_pod or self.engine.ranks_per_replica_group)

    @property
    def spans_pods(self) -> bool:
        """Whether a replica group has ranks in other pods."""
        return self.local_ranks_per_replica_group < self.engine.ranks_per_replica_group

    @property
    def has_first_rank(self) -> bool:
        """Whether this pod has the first rank of a replica group."""
        return self.first_rank_in_replica_group == 0

    @property
    def local_ranks(self) -> int:
        """All ranks that this pod runs."""
        return self.local_ranks_per_replica_group * self.replica_groups

    def check(self) -> None:
        """Raises ConfigurationError that names the flag, its value and a fix."""
        self._check_source()
        self._check_choices()
        self._check_numbers()
        self._check_parallelism()
        self._check_draft_model()
        self._check_identity()
        engine = self.engine
        check_modules(engine.lora_modules, self.model_name, engine.max_loras, engine.max_lora_rank)
        self.http.check()

    def _check_source(self) -> None:
        if (self.model.path is None) == (self.model.hf_repo is None):
            raise ConfigurationError("give exactly one of --model PATH and --hf-repo REPOSITORY")
        for flag, value in (("--hf-revision", self.model.hf_revision), ("--hf-file", self.model.hf_file)):
            if value is not None and self.model.hf_repo is None:
                raise ConfigurationError(f"{flag} {value}: only allowed together with --hf-repo")
        if self.model.hf_file is not None and not self.model.hf_file.endswith(".gguf"):
            raise ConfigurationError(
                f"--hf-file {self.model.hf_file}: not a .gguf file; omit the flag to load the whole repository"
            )
        if self.model.path is not None and not os.path.lexists(self.model.path):
            raise ConfigurationError(f"{self.model.flag}: {_NO_CHECKPOINT}")

    def _check_choices(self) -> None:
        _one_of("--dtype", self.engine.dtype, DTYPES)
        _one_of("--device", self.engine.device, DEVICES)
        _ = self.engine.kept_kind
        _one_of("--kv-cache-management", self.engine.kv_cache_management, KV_CACHE_MANAGEMENTS)
        _one_of("--logprobs-mode", self.engine.logprobs_mode, LOGPROBS_MODES)
        _one_of("--routing-policy", self.routing_policy, ROUTING_POLICIES)
        check_routing_policy(self.routing_policy, prefix_caching=self.engine.prefix_caching)

    def _check_numbers(self) -> None:
        engine = self.engine
        _at_least("--replica-groups", self.replica_groups, 1)
        _at_least("--ranks-per-pod", self.ranks_per_pod, 1)
        _at_least("--frontend-replicas", self.frontend_replicas, 1)
        _at_least("--block-size-tokens", engine.block_size_tokens, 1)
        _at_least("--max-restarts", self.max_restarts, 0)
        _at_least("--restart-reset-after", self.restart_reset_after, 0)
        _at_least("--drain-timeout", self.drain_timeout, 0)
        _at_least("--auto-suspend-after", self.auto_suspend_after, 0)
        _at_least("--hang-timeout", self.hang_timeout, MIN_HANG_TIMEOUT)
        _at_least("--max-sequence-length", engine.max_sequence_length, 2)
        _at_least("--max-requests", engine.max_requests, 1)
        _at_least("--num-cuda-graphs", engine.num_cuda_graphs, -1)
        _at_least("--num-speculative-tokens", engine.num_speculative_tokens, 0)
        _at_least("--threads-per-rank", self.threads_per_rank, 1)
        for flag, seconds in (
            ("--request-timeout", self.request_timeout),
            ("--rendezvous-timeout", self.rendezvous_timeout),
        ):
            if seconds <= 0:
                raise ConfigurationError(f"{flag} {seconds}: must be more than 0 seconds")
        check_state_memory(engine.mamba_memory_ratio, engine.prefix_caching_mamba_gb, are_flags=True)
        check_routing_alpha(self.routing_alpha, f"--routing-alpha {self.routing_alpha}:")
        for flag, port in (
            ("--port", self.port),
            ("--control-port", self.control_port),
            ("--metrics-port", self.metrics_port),
            ("--coordinator-port", self.coordinator_port),
        ):
            if port is not None and not 0 <= port <= HIGHEST_PORT:
                raise ConfigurationError(f"{flag} {port}: must be between 0 (any free port) and {HIGHEST_PORT}")

    def _check_parallelism(self) -> None:
        for name, size in self.engine.parallel_sizes.items():
            _at_least(parallel_flag(name), size, 1)
        ranks = self.engine.ranks_per_replica_group
        if self.local_ranks_per_replica_group < 1:
            raise ConfigurationError(
                f"MEGATRON_POD_INDEX={self.identity.pod_index}: the replica group's {ranks} rank(s) "
                f"fit into fewer pods with --ranks-per-pod {self.ranks_per_pod or ranks}"
            )
        if self.spans_pods:
            self._check_rendezvous_address()

    def _check_draft_model(self) -> None:
        engine = self.engine
        if (path := engine.speculative_draft_model) is None:
            return
        if not os.path.lexists(path):  # a link to nothing has a message of its own
            problem = _NO_CHECKPOINT
        elif not engine.num_speculative_tokens:
            problem = "has no effect with --num-speculative-tokens 0; set the most tokens of a draft, for example 4"
        elif engine.pipeline_parallel > 1:
            problem = (
                f"not supported with --pipeline-parallel {engine.pipeline_parallel}; use --tensor-parallel, or omit "
                "the draft model, for prompt lookup"
            )
        else:
            return
        raise ConfigurationError(f"{DRAFT_MODEL_FLAG} {path}: {problem}", field="speculative_draft_model")

    def _check_rendezvous_address(self) -> None:
        """Check the addresses that the rendezvous of several pods needs."""
        identity, ranks = self.identity, self.engine.ranks_per_replica_group
        split = f"--ranks-per-pod {self.ranks_per_pod}: the {ranks} ranks of a replica group are in several pods"
        if self.replica_groups > 1:
            raise ConfigurationError(
                f"{split}, each with one replica group; use --replica-groups 1, or --ranks-per-pod {ranks}"
            )
        needed = ("MEGATRON_MASTER_ADDR", identity.master_address, "the address of the first of them")
        if self.has_first_rank:
            needed = ("MEGATRON_BIND_HOST", identity.bind_host, "the address of this pod for the others")
        variable, value, meaning = needed
        if value is None or value in EVERY_ADDRESS:
            given = variable if value is None else f"{variable}={value}"
            raise ConfigurationError(f"{split}, but {given} is not {meaning}; set it, or use --ranks-per-pod {ranks}")

    def _check_identity(self) -> None:
        identity = self.identity
        if not identity.is_leader and identity.coordinator_address is None:
            raise ConfigurationError("MEGATRON_LEADER=0: set MEGATRON_COORDINATOR_ADDRESS to the address of the leader")
        if self.replica_groups > 1 and not identity.is_standalone:
            raise ConfigurationError(
                f"--replica-groups {self.replica_groups}: only for a standalone run; other pods have one replica group"
            )
        if is_loopback(self.private_host):
            return
        needed = {"MEGATRON_CONTROL_TOKEN": identity.control_token}
        if not identity.is_standalone:
            needed[KEY_VARIABLE] = identity.coordinator_key
        for variable, value in needed.items():
            if value is None:
                raise ConfigurationError(
                    f"{variable} is not set, but other machines can reach MEGATRON_BIND_HOST={self.private_host}; "
                    "set it, or bind to a loopback address"
                )


def parallel_flag(name: str) -> str:
    """The flag of one of `EngineOptions.parallel_sizes`."""
    return f"--{name}-parallel"


def _one_of(flag: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigurationError(f"{flag} {value}: use one of {', '.join(allowed)}")


def _at_least(flag: str, value: float | None, least: int) -> None:
    if value is not None and value < least:
        raise ConfigurationError(f"{flag} {value}: must be at least {least}")
