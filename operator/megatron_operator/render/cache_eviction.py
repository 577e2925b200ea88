"""Jobs for a model in a shared cache that nothing uses: its record, and the Job that removes it.

Both have the pod of the download Job, so that they find the same folder. A record runs no pods: it outlives the
resource and the download Job, and its age is the time since when the model is unused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_operator import names
from megatron_operator.render.model_cache import DOWNLOADS_MOUNT, RETRIES

Json = dict[str, Any]
DEADLINE = 300
"""Least seconds in which a Job has to end. It starts again later otherwise."""
KEPT_FIELDS = ("image", "imagePullPolicy", "command", "resources", "volumeMounts", "securityContext")
LEFT_OUT = ("serviceAccountName", "serviceAccount")
"""Deleted with the resource, maybe, and only downloads need its identity."""


def unused_record(download: Mapping[str, Any], place: Any) -> Json:
    """The record of the model of a download Job. ``place`` identifies its folder in the namespace."""
    metadata = download["metadata"]
    known = (names.CACHED_SOURCE_ANNOTATION, names.CACHE_NODE_ANNOTATION)
    annotations = {each: metadata["annotations"][each] for each in known if each in metadata["annotations"]}
    spec = download["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    folder = f"{DOWNLOADS_MOUNT}/{metadata['namespace']}/{annotations[names.CACHED_SOURCE_ANNOTATION]}"
    pod = {
        **{field: value for field, value in spec.items() if field not in LEFT_OUT},
        "containers": [
            {
                "name": names.CONTAINER,
                **{field: container[field] for field in KEPT_FIELDS if field in container},
                "args": ["model", "evict", folder],
            }
        ],
    }
    return {
        "apiVersion": "batch/v1",
        "kind": names.JOB,
        "metadata": {
            "name": names.unused_model(names.RECORDED, place),
            "namespace": metadata["namespace"],
            "labels": {"app.kubernetes.io/managed-by": names.MANAGER, names.UNUSED_LABEL: names.RECORDED},
            "annotations": annotations,
        },
        "spec": {
            "parallelism": 0,
            "backoffLimit": RETRIES,
            "template": {"metadata": {"labels": {"app.kubernetes.io/managed-by": names.MANAGER}}, "spec": pod},
        },
    }


def eviction_job(record: Mapping[str, Any], place: Any, retention: int) -> Json:
    """The Job that removes the model of a record, unless a download has filled or found it recently.

    "Recently" is half the retention in seconds, and the Job has to end in this time. So a download that finds the
    model after the decision to evict it is recent, and the model stays for it. The other half is for clocks that
    differ.
    """
    recent = retention // 2
    metadata, spec = record["metadata"], record["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    pod = {**spec, "containers": [{**container, "args": [*container["args"], f"--unused-for={recent}"]}]}
    labels = {"app.kubernetes.io/managed-by": names.MANAGER}
    return {
        "apiVersion": "batch/v1",
        "kind": names.JOB,
        "metadata": {
            "name": names.unused_model(names.EVICTED, place),
            "namespace": metadata["namespace"],
            "labels": {**labels, names.UNUSED_LABEL: names.EVICTED},
            "annotations": dict(metadata["annotations"]),
        },
        "spec": {
            "backoffLimit": RETRIES,
            "activeDeadlineSeconds": max(recent, DEADLINE),
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }
