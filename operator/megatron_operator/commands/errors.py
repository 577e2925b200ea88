"""What went wrong, in one line for the person who typed the command.

CommandFailed       the command did not do as asked
  CommandRefused    as asked, it makes no sense
"""

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
from megatron_operator.world import WorldError

FAILED = 1
BAD_USAGE = 2
INTERRUPTED = 130
LISTED_NAMES = 5
INSTALL = "install it: helm install megatron charts/megatron-inference, or kubectl apply -k manifests"


class CommandFailed(Exception):
    """``str()`` is one line of words."""

    exit_code = FAILED


class CommandRefused(CommandFailed):
    """What was asked makes no sense as it stands."""

    exit_code = BAD_USAGE


@dataclass(frozen=True)
class Access:
    """Which cluster is meant, and which namespace in it; None where the kubeconfig decides."""

    kubeconfig: Path | None = None
    context: str | None = None
    namespace: str | None = None


def on_cluster(access: Access, command: Callable[[UserCluster, str], Awaitable[int | None]]) -> None:
    """Run ``command`` with the cluster and the namespace that are meant, and end the program with its exit code."""
    try:
        code = asyncio.run(_on_cluster(access, command))
    except CommandFailed as failure:
        print(f"error: {failure}", file=sys.stderr)
        code = failure.exit_code
    except KeyboardInterrupt:
        code = INTERRUPTED
    except BrokenPipeError:
        # Whoever reads has left, as `head` does: there is nobody to complain to, and nothing more to flush.
        sys.stdout = None
        code = FAILED
    sys.exit(code)


async def _on_cluster(access: Access, command: Callable[[UserCluster, str], Awaitable[int | None]]) -> int:
    try:
        cluster = await UserCluster.open(access.kubeconfig, access.context)
    except WorldError as error:
        raise CommandFailed(str(error)) from error
    async with cluster:
        try:
            return await command(cluster, access.namespace or cluster.namespace) or 0
        except WorldError as error:
            raise CommandFailed(in_words(error, cluster)) from error


def in_words(error: WorldError, cluster: UserCluster) -> str:
    """What an API server's refusal or silence means to a person."""
    status = error.status if isinstance(error, (ServerError, ServerRefusal)) else None
    said = str(error).partition(": ")[2] or str(error)
    match status:
        case None:
            cause = said.removeprefix("the API server cannot be reached: ")
            words = f"the API server {cluster.server} of context {cluster.context} does not answer: {cause}"
            return f"{words}; is the cluster up, and is this the context that you mean?"
        case http.HTTPStatus.UNAUTHORIZED:
            words = f"the API server {cluster.server} does not know you: the credentials of context {cluster.context}"
            return f"{words} are wrong or have expired; log in again"
        case http.HTTPStatus.FORBIDDEN:
            return f"not allowed: {said.removesuffix(' (403)')}; ask for a Role that grants it"
        case http.HTTPStatus.NOT_FOUND if resources_path(None).rpartition("/")[0] in str(error):
            return f"MegatronInference is not defined on the cluster of context {cluster.context}; {INSTALL}"
        case _:
            return said


async def existing(cluster: UserCluster, namespace: str, name: str) -> Json:
    """The resource. Raises CommandFailed, with names that are near, when there is none."""
    obj = await cluster.get("MegatronInference", namespace, name)
    if obj is None:
        raise CommandFailed(await not_found(cluster, namespace, name))
    return obj


async def not_found(cluster: UserCluster, namespace: str, name: str) -> str:
    """Words for a resource that is not there. Raises ServerError where the kind itself is not defined."""
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
        return f"{words}, where there are: {', '.join(names[:LISTED_NAMES])}{more}"
    return f"{words}, which has none; `kubectl get mi -A` lists those of all namespaces"
