"""Errors of the user commands, each as one line."""

from __future__ import annotations

import asyncio
import difflib
import http
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from megatron_operator.kubernetes.api_server import Json, ServerError, ServerRefusal
from megatron_operator.kubernetes.user_cluster import UserCluster, resources_path
from megatron_operator.observed_state import AdapterError

FAILED = 1
BAD_USAGE = 2
INTERRUPTED = 130
LISTED_NAMES = 5
INSTALL = "install it: helm install megatron charts/megatron-inference, or kubectl apply -k manifests"


class CommandFailed(Exception):
    """A command failed. ``str()`` is the message, in one line."""

    exit_code = FAILED


class CommandRefused(CommandFailed):
    """The command makes no sense for the resource, or an option is invalid."""

    exit_code = BAD_USAGE


@dataclass(frozen=True)
class Access:
    """Cluster and namespace of a command; None for the default of the kubeconfig."""

    kubeconfig: Path | None = None
    context: str | None = None
    namespace: str | None = None


def on_cluster(access: Access, command: Callable[[UserCluster, str], Awaitable[int | None]]) -> None:
    """Run ``command`` on its cluster and namespace, and exit with its exit code."""
    try:
        code = asyncio.run(_on_cluster(access, command))
    except CommandFailed as failure:
        print(f"error: {failure}", file=sys.stderr)
        code = failure.exit_code
    except KeyboardInterrupt:
        code = INTERRUPTED
    except BrokenPipeError:
        # The reader has closed the pipe, as `head` does; nothing more can be printed or flushed.
        sys.stdout = None
        code = FAILED
    sys.exit(code)


async def _on_cluster(access: Access, command: Callable[[UserCluster, str], Awaitable[int | None]]) -> int:
    try:
        cluster = await UserCluster.open(access.kubeconfig, access.context)
    except AdapterError as error:
        raise CommandFailed(str(error)) from error
    async with cluster:
        try:
            return await command(cluster, access.namespace or cluster.namespace) or 0
        except AdapterError as error:
            raise CommandFailed(in_words(error, cluster)) from error


def in_words(error: AdapterError, cluster: UserCluster) -> str:
    """An API server's error as a message for users."""
    status = error.status if isinstance(error, (ServerError, ServerRefusal)) else None
    said = str(error).partition(": ")[2] or str(error)
    match status:
        case None:
            cause = said.removeprefix("the API server cannot be reached: ")
            words = f"the API server {cluster.server} of context {cluster.context} does not answer: {cause}"
            return f"{words}; is the cluster up, and is this the right context?"
        case http.HTTPStatus.UNAUTHORIZED:
            words = f"the API server {cluster.server} rejects the credentials of context {cluster.context}: they"
            return f"{words} are wrong or have expired; log in again"
        case http.HTTPStatus.FORBIDDEN:
            return f"not allowed: {said.removesuffix(' (403)')}; ask for a Role that grants it"
        case http.HTTPStatus.NOT_FOUND if resources_path(None).rpartition("/")[0] in str(error):
            return f"MegatronInference is not defined on the cluster of context {cluster.context}; {INSTALL}"
        case _:
            return said


async def existing(cluster: UserCluster, namespace: str, name: str) -> Json:
    """The resource. Raises CommandFailed, with similar names, when it does not exist."""
    obj = await cluster.get("MegatronInference", namespace, name)
    if obj is None:
        raise CommandFailed(await not_found(cluster, namespace, name))
    return obj


async def not_found(cluster: UserCluster, namespace: str, name: str) -> str:
    """Message for a resource that does not exist. Raises ServerError when the CRD is missing."""
    words = f"MegatronInference {name} is not in namespace {namespace}"
    try:
        items = (await cluster.read(resources_path(namespace))).get("items") or []
    except ServerRefusal:
        return words
    names = sorted(item["metadata"]["name"] for item in items)
    if near := difflib.get_close_matches(name, names, n=3):
        return f"{words}; did you mean {' or '.join(near)}?"
    if names:
        more = ", ..." if len(names) > LISTED_NAMES else ""
        return f"{words}, which has: {', '.join(names[:LISTED_NAMES])}{more}"
    return f"{words}, which has none; `kubectl get mi -A` lists those of all namespaces"
