"""Kueue's Workloads: deleted with groups of pods that end before they have run."""

from __future__ import annotations

from collections.abc import Collection

from megatron_operator import kueue, names
from megatron_operator.kubernetes.api_server import ApiServer


async def delete_workload(api: ApiServer, namespace: str, name: str) -> None:
    """Delete the Workload, in whichever API version Kueue serves it. One that is gone is success.

    Raises ServerRefusal and ServerError.
    """
    for kind in kueue.WORKLOADS:
        await api.delete(kind, namespace, name, uid=None, grace_seconds=0)


async def delete_workloads_of_deleted(
    api: ApiServer, namespace: str, resource: str, uid: str, workloads: Collection[str]
) -> None:
    """Delete those of the Workloads whose pods the garbage collector deletes with their owner, the resource.

    Pods that stay without an owner keep their Workloads. Raises ServerRefusal and ServerError.
    """
    if not workloads:
        return
    for pod in await api.list("Pod", namespace, names.selector_labels(resource)):
        metadata = pod["metadata"]
        workload = metadata["labels"].get(kueue.GROUP_LABEL)
        is_owned = uid in [owner["uid"] for owner in metadata.get("ownerReferences") or []]
        if is_owned and workload in workloads:
            await delete_workload(api, namespace, workload)
