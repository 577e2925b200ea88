"""Kueue's Workloads: deleted with groups of pods that end before they have run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_operator import kueue, names
from megatron_operator.kubernetes.api_server import ApiServer
from megatron_operator.kubernetes.pod_status import observed_pod
from megatron_operator.replica_groups import ended_workloads


async def delete_workload(api: ApiServer, namespace: str, name: str) -> None:
    """Delete the Workload, in whichever API version Kueue serves it. One that is gone is success.

    Raises ServerRefusal and ServerError.
    """
    for kind in kueue.WORKLOADS:
        await api.delete(kind, namespace, name, uid=None, grace_seconds=0)


async def delete_workloads_of_deleted(api: ApiServer, namespace: str, resource: str) -> None:
    """Delete the Workloads of the pods that the garbage collector has deleted with their owner, the resource.

    Pods that stay without an owner keep their Workloads. Raises ServerRefusal and ServerError.
    """
    pods = [observed_pod(pod) for pod in await api.list("Pod", namespace, names.selector_labels(resource))]
    for name in ended_workloads(pod for pod in pods if pod is not None):
        await delete_workload(api, namespace, name)


def keeps(pod: Mapping[str, Any]) -> bool:
    """Whether Kueue keeps a deleted pod that never had a node."""
    observed = observed_pod(pod) if kueue.MANAGED in (pod["metadata"].get("finalizers") or []) else None
    return observed is not None and bool(ended_workloads([observed]))
