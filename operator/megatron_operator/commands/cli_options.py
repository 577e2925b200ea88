"""Arguments and options of the user commands.

The implementation of a command is imported when it runs, so that `--help` is fast.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

if TYPE_CHECKING:
    from megatron_operator.commands.errors import Access

Name = Annotated[str, typer.Argument(metavar="NAME", help="The MegatronInference.")]
Namespace = Annotated[
    str | None, typer.Option("--namespace", "-n", help="Namespace; default: the namespace of the kubeconfig's context.")
]
Context = Annotated[str | None, typer.Option("--context", help="Context of the kubeconfig; default: the current one.")]
Kubeconfig = Annotated[
    Path | None, typer.Option("--kubeconfig", help="Path of the kubeconfig; default: KUBECONFIG or ~/.kube/config.")
]
Wait = Annotated[
    bool, typer.Option("--wait", help="Return when the state is reached; fail with the reason when it cannot be.")
]
Timeout = Annotated[str, typer.Option("--timeout", help="Longest time to --wait, like 90s or 10m.")]
PATIENCE = "5m"
VERBS = {
    "pause": "Hold all requests, running and new ones.",
    "unpause": "From Paused to Running: continue the requests that wait.",
    "suspend": "Pause, and release the memory of the KV cache; the pods stay.",
    "resume": "From Suspended to Paused; continue with `unpause`. `start` does both.",
    "stop": "Drain and remove the pods; the resource and its keys stay.",
    "start": "To Running, from any state.",
}
"""The commands that change ``spec.lifecycle``, with their help."""


def register(app: typer.Typer) -> None:
    """Add the user commands to ``app``."""
    app.command()(describe)
    for verb, words in VERBS.items():
        app.command(verb, help=words)(_verb(verb))
    app.command()(logs)
    app.command()(chat)
    app.command()(doctor)


def describe(name: Name, namespace: Namespace = None, context: Context = None, kubeconfig: Kubeconfig = None) -> None:
    """Show the state of a resource, the cause, what it waits for, and the next step."""
    from megatron_operator.commands.describe import describe as told
    from megatron_operator.commands.errors import on_cluster

    access = _access(kubeconfig, context, namespace)
    on_cluster(access, lambda cluster, where: told(cluster, where, name, Console()))


def _verb(verb: str) -> Callable[..., None]:
    """The command for one verb."""

    def command(
        name: Name,
        wait: Wait = False,
        timeout: Timeout = PATIENCE,
        namespace: Namespace = None,
        context: Context = None,
        kubeconfig: Kubeconfig = None,
    ) -> None:
        _change(verb, name, wait, timeout, _access(kubeconfig, context, namespace))

    return command


def logs(
    name: Name,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Continue with new lines, of new pods too.")] = False,
    group: Annotated[int | None, typer.Option("--group", "-g", min=0, help="Only this replica group.")] = None,
    rank: Annotated[
        int | None, typer.Option("--rank", "-r", min=0, help="Only this rank, in each replica group.")
    ] = None,
    since: Annotated[str | None, typer.Option("--since", help="Only lines newer than this, like 30s or 2h.")] = None,
    tail: Annotated[int | None, typer.Option("--tail", min=0, help="Only the last lines of each pod.")] = None,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Print the logs of all pods and ranks, sorted by time."""
    from megatron_operator.commands.errors import on_cluster
    from megatron_operator.commands.logs import LogRequest, Logs

    request = LogRequest(name, follow, group, rank, since, tail)
    access = _access(kubeconfig, context, namespace)
    on_cluster(access, lambda cluster, where: Logs(cluster, where, request, Console()).run())


def chat(
    name: Name,
    question: Annotated[
        str | None, typer.Argument(help="A single question; without it, read questions from standard input.")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="MEGATRON_API_KEY", help="API key, where the resource requires one.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Longest answer, in tokens.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0.0, help="0 always picks the most probable token.")] = None,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Chat with the model through the API server's proxy; needs the right to create services/proxy."""
    from megatron_operator.commands.chat import Chat
    from megatron_operator.commands.errors import on_cluster

    given = {"max_tokens": max_tokens, "temperature": temperature}
    options = {field: value for field, value in given.items() if value is not None}
    access = _access(kubeconfig, context, namespace)
    on_cluster(access, lambda cluster, where: Chat(cluster, where, name, api_key, system, options).run(question))


def doctor(namespace: Namespace = None, context: Context = None, kubeconfig: Kubeconfig = None) -> None:
    """Check the cluster for missing prerequisites and show how to fix them; exit code 1 if any is missing."""
    from megatron_operator.commands.doctor import Doctor
    from megatron_operator.commands.errors import on_cluster

    access = _access(kubeconfig, context, namespace)
    on_cluster(access, lambda cluster, where: Doctor(cluster, where, Console()).run())


def _change(verb: str, name: str, wait: bool, timeout: str, access: Access) -> None:
    from megatron_operator.commands.change import change
    from megatron_operator.commands.errors import on_cluster
    from megatron_operator.commands.lifecycle_verbs import Verb

    chosen, console = Verb(verb), Console()
    on_cluster(
        access,
        lambda cluster, where: change(cluster, where, name, chosen, wait=wait, timeout=timeout, console=console),
    )


def _access(kubeconfig: Path | None, context: str | None, namespace: str | None) -> Access:
    from megatron_operator.commands.errors import Access

    return Access(kubeconfig, context, namespace)
