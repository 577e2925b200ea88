"""Events as API objects."""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from megatron_operator.events import Event
from megatron_operator.names import MANAGER

LONGEST_NOTE = 1024
"""In bytes, as the API server counts."""
ACTION = "Reconcile"
LONGEST_NAME = 200


def kubernetes_event(obj: Mapping[str, Any], event: Event) -> dict[str, Any]:
    """An ``events.k8s.io/v1`` Event about ``obj``, with a unique name."""
    metadata = obj["metadata"]
    return {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {
            "name": f"{metadata['name'][:LONGEST_NAME]}.{uuid.uuid4().hex[:16]}",
            "namespace": metadata["namespace"],
        },
        "type": event.type.value,
        "reason": event.reason,
        "action": ACTION,
        "note": event.message.encode()[:LONGEST_NOTE].decode(errors="ignore"),
        "eventTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        "reportingController": MANAGER,
        "reportingInstance": os.environ.get("HOSTNAME") or socket.gethostname(),
        "regarding": {
            "apiVersion": obj["apiVersion"],
            "kind": obj["kind"],
            "name": metadata["name"],
            "namespace": metadata["namespace"],
            "uid": metadata["uid"],
            "resourceVersion": metadata["resourceVersion"],
        },
    }
