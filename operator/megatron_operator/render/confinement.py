"""The rights of a pod's processes, and where they leave their last words."""

from __future__ import annotations

from typing import Any

from megatron_operator import names


def unprivileged() -> dict[str, Any]:
    """The security context of a pod whose volumes belong to its user."""
    return {
        "runAsNonRoot": True,
        "runAsUser": names.USER,
        "runAsGroup": names.USER,
        "fsGroup": names.USER,
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def confined_container() -> dict[str, Any]:
    """The fields of a container that can't gain rights, and writes to its volumes only."""
    return {
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "terminationMessagePath": names.TERMINATION_LOG,
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
