"""Why a pod ended: the launcher's termination message, or the exit code."""

from __future__ import annotations

import json
import re
from typing import Any

from megatron_operator.observed_state import BAD_INPUT_EXIT_CODE, Failure

SIGNALLED = 128
SIGKILL = 9
CHECKPOINT_ERROR = "CheckpointError"
SOURCE_FIELD = "spec.model.source"

FIELD_OF_FLAG = {
    "--model": SOURCE_FIELD,
    "--hf-repo": "spec.model.source.huggingFace.repo",
    "--hf-file": "spec.model.source.huggingFace.file",
    "--hf-revision": "spec.model.source.huggingFace.revision",
    "--served-name": "spec.model.servedName",
    "--dtype": "spec.model.dtype",
    "--max-sequence-length": "spec.model.maxSequenceLength",
    "--tensor-parallel": "spec.parallelism.tensor",
    "--pipeline-parallel": "spec.parallelism.pipeline",
    "--expert-parallel": "spec.parallelism.expert",
    "--ranks-per-pod": "spec.pods.ranksPerPod",
    "--device": "spec.pods.device",
    "--block-size-tokens": "spec.engine.blockSizeTokens",
    "--kv-cache-memory": "spec.engine.kvCacheMemory",
    "--max-requests": "spec.engine.maxRequests",
    "--mamba-memory-ratio": "spec.engine.mambaMemoryRatio",
    "--prefix-caching-mamba-gb": "spec.engine.prefixCachingMambaGb",
    "--prefix-caching": "spec.engine.prefixCaching",
    "--no-prefix-caching": "spec.engine.prefixCaching",
    "--chunked-prefill": "spec.engine.chunkedPrefill",
    "--no-chunked-prefill": "spec.engine.chunkedPrefill",
    "--num-speculative-tokens": "spec.engine.speculation.numTokens",
    "--speculative-draft-model": "spec.engine.speculation.draftModel",
    "--kv-cache-management": "spec.engine.kvCacheManagement",
    "--offload-weights": "spec.engine.offloadWeights",
    "--routing-policy": "spec.routing.policy",
    "--routing-alpha": "spec.routing.alpha",
    "--frontend-replicas": "spec.frontend.replicas",
    "--lora-modules": "spec.adapters",
    "--parsers": "spec.frontend.parsers",
    "--generation-config": "spec.frontend.generationConfig",
    "--pooling": "spec.frontend.pooling",
    "--trust-request-chat-template": "spec.frontend.trustRequestChatTemplate",
    "--media-placeholder": "spec.frontend.mediaPlaceholder",
    "--no-page": "spec.frontend.page",
    "--drain-timeout": "spec.rollout.drainTimeout",
    "--auto-suspend-after": "spec.autoSuspend.idleAfter",
    "--max-restarts": "spec.failurePolicy.maxRestarts",
    "--rendezvous-timeout": "spec.failurePolicy.startupTimeout",
    "--restart-reset-after": "spec.failurePolicy.resetAfter",
}
"""The launcher's messages name its flags; a condition names the fields of the resource."""

FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]*[a-z]")


def read_failure(exit_code: int | None, reason: str, message: str) -> Failure:
    """From a container's exit code, the kubelet's reason, and the termination message.

    The launcher writes JSON: ``{"reason", "message", "rank", "exitCode"}``. Other text, such as the end of the log, is
    used as the message. A message about invalid input names fields of the resource instead of flags.
    """
    words = _launcher_words(message)
    if words is None:
        return Failure(reason=reason or "Error", message=message or _from_code(exit_code), exit_code=exit_code)
    reason = str(words.get("reason") or reason or "Error")
    said = str(words.get("message") or "")
    rank = words.get("rank")
    return Failure(
        reason=reason,
        message=in_fields(reason, said) if exit_code == BAD_INPUT_EXIT_CODE else said,
        rank=rank if isinstance(rank, int) else None,
        exit_code=exit_code,
    )


def in_fields(reason: str, message: str) -> str:
    """The launcher's ``message``, with fields of the resource in place of flags."""
    told = FLAG.sub(lambda flag: FIELD_OF_FLAG.get(flag[0], flag[0]), message)
    if reason == CHECKPOINT_ERROR and SOURCE_FIELD not in told:
        return f"{SOURCE_FIELD}: {told}"
    return told


def _launcher_words(message: str) -> dict[str, Any] | None:
    try:
        words = json.loads(message)
    except ValueError:
        return None
    return words if isinstance(words, dict) else None


def _from_code(exit_code: int | None) -> str:
    if exit_code is None:
        return "ended without an exit code"
    if exit_code == SIGNALLED + SIGKILL:
        return "killed (exit code 137), perhaps because memory ran out"
    if exit_code > SIGNALLED:
        return f"ended by signal {exit_code - SIGNALLED}"
    return f"ended with exit code {exit_code} and no message"
