"""Command line and environment of a pod: the operator's side of the contract with the runtime."""

from __future__ import annotations

import re
from typing import Any

from megatron_operator import names
from megatron_operator.api.v1alpha1 import Frontend, MegatronInference, Pooling
from megatron_operator.names import PodIdentity

PROGRAM = "megatron-serve"
MODEL_MOUNT = "/models"
"""Where the volume with the model is mounted."""
CACHE_MOUNT = "/cache"
"""Where downloads are stored."""

CACHED_MODEL_MOUNT = "/cached-model"
"""Where the folder of the model in the model cache is mounted."""

LONGEST_RENDEZVOUS = 7 * 86400
"""Seconds that ranks wait for pods of their group, which may wait for a node. The startup timeout is shorter."""

_DEFAULT_MAX_LORAS = 8
"""Adapters that the runtime accepts without a flag."""
API_KEYS_MOUNT = "/etc/megatron"
"""Where the Secret with the API keys is mounted."""
API_KEYS_FILE = "api-keys"

Env = list[dict[str, Any]]


def arguments(resource: MegatronInference, *, max_restarts: int) -> list[str]:
    """The flags of megatron-serve. ``max_restarts`` is the rest of the group's budget."""
    spec = resource.spec
    engine, parallelism = spec.engine, spec.parallelism
    flags = {
        **_source(resource),
        "--served-name": resource.served_name,
        "--dtype": spec.model.dtype.value,
        "--tensor-parallel": parallelism.tensor,
        "--pipeline-parallel": parallelism.pipeline,
        "--expert-parallel": parallelism.expert,
        "--ranks-per-pod": spec.pods.ranks_per_pod,
        "--device": spec.pods.device.value,
        "--block-size-tokens": engine.block_size_tokens,
        "--max-requests": engine.max_requests,
        "--kv-cache-management": engine.kv_cache_management.value.lower(),
        "--routing-policy": _kebab(spec.routing.policy.value),
        "--routing-alpha": f"{spec.routing.alpha:g}",
        "--frontend-replicas": spec.frontend.replicas,
        "--drain-timeout": f"{spec.rollout.drain_timeout:g}",
        "--auto-suspend-after": f"{spec.auto_suspend.idle_after:g}",
        "--max-restarts": max_restarts,
        "--rendezvous-timeout": LONGEST_RENDEZVOUS,
        "--restart-reset-after": f"{spec.failure_policy.reset_after:g}",
    }
    if spec.kv_cache_memory is not None:
        flags["--kv-cache-memory"] = spec.kv_cache_memory.text
    if engine.mamba_memory_ratio:
        flags["--mamba-memory-ratio"] = f"{engine.mamba_memory_ratio:g}"
    if engine.prefix_caching_mamba_gb is not None:
        flags["--prefix-caching-mamba-gb"] = f"{engine.prefix_caching_mamba_gb:g}"
    if spec.model.max_sequence_length is not None:
        flags["--max-sequence-length"] = spec.model.max_sequence_length
    if engine.speculation is not None:
        flags["--num-speculative-tokens"] = engine.speculation.num_tokens
        if engine.speculation.draft_model is not None:
            flags["--speculative-draft-model"] = engine.speculation.draft_model
    words = [f"{flag}={value}" for flag, value in flags.items()]
    words.append("--prefix-caching" if engine.prefix_caching else "--no-prefix-caching")
    words.append("--chunked-prefill" if engine.chunked_prefill else "--no-chunked-prefill")
    if engine.offload_weights:
        words.append("--offload-weights")
    if spec.expose.inference_pool is not None and spec.frontend.api_keys_secret is not None:
        words.append("--picker-metrics-without-key")  # Endpoint pickers have no API keys.
    return [*words, *_adapter_flags(resource), *_frontend_flags(spec.frontend), *engine.extra_args]


def _adapter_flags(resource: MegatronInference) -> list[str]:
    adapters = resource.spec.adapters
    words = [f"--lora-modules={adapter.name}={adapter.path}" for adapter in adapters]
    return [*words, f"--max-loras={len(adapters)}"] if len(adapters) > _DEFAULT_MAX_LORAS else words


def _frontend_flags(frontend: Frontend) -> list[str]:
    words = [f"--parsers={parser.value}" for parser in frontend.parsers]
    if frontend.shared_prefix_cache:
        words.append("--shared-prefix-cache")
    if frontend.generation_config != "auto":
        words.append(f"--generation-config={frontend.generation_config}")
    if frontend.pooling is not Pooling.LAST:
        words.append(f"--pooling={frontend.pooling.value.lower()}")
    if frontend.trust_request_chat_template:
        words.append("--trust-request-chat-template")
    if frontend.media_placeholder:
        words.append("--media-placeholder")
    if not frontend.page:
        words.append("--no-page")
    return words


def environment(resource: MegatronInference, identity: PodIdentity) -> Env:
    """The pod's identity, the addresses of its peers, and the shared keys."""
    name, namespace = resource.name, resource.namespace
    first_pod = names.pod_name(name, identity.group, identity.attempt, 0)
    coordinator = f"tcp://{names.coordinator_host(name, namespace)}:{names.COORDINATOR_PORT}"
    plain = {
        "MEGATRON_REPLICA_GROUP": str(identity.group),
        "MEGATRON_ATTEMPT": str(identity.attempt),
        "MEGATRON_POD_INDEX": str(identity.index),
        "MEGATRON_LEADER": "1" if identity.leader else "0",
        "MEGATRON_LEADER_EPOCH": str(identity.epoch),
        "MEGATRON_LIFECYCLE": resource.spec.lifecycle.value,
        "MEGATRON_COORDINATOR_ADDRESS": coordinator,
        "MEGATRON_MASTER_ADDR": names.pod_host(first_pod, name, namespace),
    }
    if resource.spec.frontend.api_keys_secret is not None:
        plain["MEGATRON_API_KEYS_FILE"] = f"{API_KEYS_MOUNT}/{API_KEYS_FILE}"
    return [
        *({"name": variable, "value": value} for variable, value in plain.items()),
        *control_environment(resource),
        _from_secret("MEGATRON_COORDINATOR_KEY", names.keys_secret(name), names.COORDINATOR_KEY),
        *([] if resource.spec.model.cache else hub_token(resource)),
    ]


def control_environment(resource: MegatronInference) -> Env:
    """What a pod of any kind needs to report to the operator and to download."""
    return [
        {"name": "MEGATRON_TERMINATION_LOG", "value": names.TERMINATION_LOG},
        {"name": "HF_HOME", "value": CACHE_MOUNT},
        {"name": "MEGATRON_BIND_HOST", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        _from_secret("MEGATRON_CONTROL_TOKEN", names.keys_secret(resource.name), names.CONTROL_TOKEN),
    ]


def _source(resource: MegatronInference) -> dict[str, Any]:
    source = resource.spec.model.source
    if resource.spec.model.cache is not None:
        return {"--model": "/".join(filter(None, (CACHED_MODEL_MOUNT, cached_file(resource))))}
    if (hub := source.hugging_face) is not None:
        file = {} if hub.file is None else {"--hf-file": hub.file}
        return {"--hf-repo": hub.repo, **file, "--hf-revision": hub.revision}
    if source.volume_path is not None:
        return {"--model": f"{MODEL_MOUNT}{source.volume_path}".rstrip("/")}
    return {"--model": source.path}


def cached_file(resource: MegatronInference) -> str | None:
    """The GGUF file in the folder of the model cache; None for the folder."""
    source = resource.spec.model.source
    if source.object_storage is not None:
        name = source.object_storage.uri.rpartition("/")[2]
        return name if name.endswith(".gguf") else None
    return None if source.hugging_face is None else source.hugging_face.file


def hub_token(resource: MegatronInference) -> Env:
    """The access token for the hub, if there is one."""
    hub = resource.spec.model.source.hugging_face
    if hub is None or hub.token_secret is None:
        return []
    return [_from_secret("HF_TOKEN", hub.token_secret.name, hub.token_secret.key)]


def _from_secret(variable: str, secret: str, key: str) -> dict[str, Any]:
    return {"name": variable, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}


def _kebab(words: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "-", words).lower()
