"""Kueue's names: labels, annotations and gates of queued pods, and the Workload of a group of pods."""

from __future__ import annotations

QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
GROUP_LABEL = "kueue.x-k8s.io/pod-group-name"
"""The name of a pod's group, which is also that of the group's Workload."""
COUNT_ANNOTATION = "kueue.x-k8s.io/pod-group-total-count"
REQUIRED_TOPOLOGY_ANNOTATION = "kueue.x-k8s.io/podset-required-topology"
PREFERRED_TOPOLOGY_ANNOTATION = "kueue.x-k8s.io/podset-preferred-topology"
SETS_ANNOTATION = "kueue.x-k8s.io/podset-group-name"
"""Sets of pods with the same value get one topology domain."""
RETRY_ANNOTATION = "kueue.x-k8s.io/retriable-in-group"

MANAGED = "kueue.x-k8s.io/managed"
"""Label of the pods that Kueue manages, and the finalizer by which it keeps them until their group has ended."""
ADMISSION_GATE = "kueue.x-k8s.io/admission"
TOPOLOGY_GATE = "kueue.x-k8s.io/topology"
TERMINATION_TARGET = "TerminationTarget"
"""Condition of the pods that Kueue evicts."""

WORKLOAD = "Workload.kueue.x-k8s.io"
"""Kind of the Workloads, in any API version."""
WORKLOADS = {f"{WORKLOAD}/{version}": f"kueue.x-k8s.io/{version}" for version in ("v1beta2", "v1beta1")}
"""The same in the API versions of Kueue's releases, of which one may serve both."""
