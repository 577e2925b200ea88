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
    return _job(names.RECORDED, place, metadata["namespace"], annotations, pod, {"parallelism": 0})


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
    deadline = {"activeDeadlineSeconds": max(recent, DEADLINE)}
    return _job(names.EVICTED, place, metadata["namespace"], dict(metadata["annotations"]), pod, deadline)


def _job(state: str, place: Any, namespace: str, annotations: Json, pod: Json, spec: Json) -> Json:
    """A Job with this value of ``UNUSED_LABEL``."""
    labels = {"app.kubernetes.io/managed-by": names.MANAGER}
    return {
        "apiVersion": "batch/v1",
        "kind": names.JOB,
        "metadata": {
            "name": names.unused_model(state, place),
            "namespace": namespace,
            "labels": {**labels, names.UNUSED_LABEL: state},
            "annotations": annotations,
        },
        "spec": {**spec, "backoffLimit": RETRIES, "template": {"metadata": {"labels": labels}, "spec": pod}},
    }
