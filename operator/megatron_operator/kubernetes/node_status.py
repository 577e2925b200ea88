"""The status of a node."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def node_is_ready(node: Mapping[str, Any]) -> bool:
    """Whether the node's kubelet reports that pods can run on it."""
    conditions = (node.get("status") or {}).get("conditions") or []
    return any(each.get("type") == "Ready" and each.get("status") == "True" for each in conditions)
