"""``describe``: reads a resource, its pods and its events, and prints them."""

from __future__ import annotations

import time

from rich.console import Console

from megatron_operator import names
from megatron_operator.commands.console import say
from megatron_operator.commands.describe_view import DescribeView
from megatron_operator.commands.errors import existing
from megatron_operator.kubernetes.api_server import Json, ServerRefusal
from megatron_operator.kubernetes.user_cluster import UserCluster, core_path


async def describe(cluster: UserCluster, namespace: str, name: str, console: Console) -> None:
    """Print the resource. Raises CommandFailed, AdapterError."""
    obj = await existing(cluster, namespace, name)
    pods, hidden_pods = await _readable(cluster, namespace, "pods", labelSelector=_selector(name))
    fields = f"involvedObject.uid={obj['metadata']['uid']}"
    events, hidden_events = await _readable(cluster, namespace, "events", fieldSelector=fields)
    hidden = tuple(words for words in (hidden_pods, hidden_events) if words)
    for line in DescribeView(obj, pods, events, now=time.time(), hidden=hidden).lines():
        say(console, line)


async def _readable(cluster: UserCluster, namespace: str, plural: str, **query: str) -> tuple[list[Json], str]:
    """The objects, and a message when reading them is forbidden."""
    try:
        return (await cluster.read(core_path(namespace, plural), query)).get("items") or [], ""
    except ServerRefusal as refusal:
        return [], f"{plural} are not shown: {str(refusal).partition(': ')[2]}"


def _selector(name: str) -> str:
    return f"{names.NAME_LABEL}={name}"
