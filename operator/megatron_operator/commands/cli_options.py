"""How the commands on a cluster are typed: their arguments and options.

What they do is imported when one of them runs, so that `--help` is there at once.
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
    str | None, typer.Option("--namespace", "-n", help="Namespace; that of the kubeconfig's context when left out.")
]
Context = Annotated[
    str | None, typer.Option("--context", help="Context of the kubeconfig; the current one by default.")
]
Kubeconfig = Annotated[Path | None, typer.Option("--kubeconfig", help="Instead of KUBECONFIG or ~/.kube/config.")]
Wait = Annotated[bool, typer.Option("--wait", help="Return when it is so; fail with the reason when it fails.")]
Timeout = Annotated[str, typer.Option("--timeout", help="How long --wait waits, like 90s or 10m.")]
PATIENCE = "5m"
VERBS = {
    "pause": "Hold all requests where they are; they and new ones wait.",
    "unpause": "From Paused to Running: go on with the requests that wait.",
    "suspend": "Pause, and give the memory of the KV cache back; the pods stay.",
    "resume": "From Suspended to Paused; `unpause` goes on from there, `start` does both.",
    "stop": "Drain and remove the pods; the resource and its keys stay.",
    "start": "To Running, from wherever it is.",
}
"""The commands that change ``spec.lifecycle``, with their help."""


def register(app: typer.Typer) -> None:
    """Add the commands that ask a cluster."""
    app.command()(describe)
    for verb, words in VERBS.items():
        app.command(verb, help=words)(_verb(verb))
    app.command()(logs)
    app.command()(chat)
    app.command()(doctor)


def describe(name: Name, namespace: Namespace = None, context: Context = None, kubeconfig: Kubeconfig = None) -> None:
    """Tell how a resource is, why, what it waits for, and what to do next."""
    from megatron_operator.commands.describe import describe as told
    from megatron_operator.commands.errors import on_cluster

    access = _access(kubeconfig, context, namespace)
    on_cluster(access, lambda cluster, where: told(cluster, where, name, Console()))


def _verb(verb: str) -> Callable[..., None]:
    """The command of one verb: they all take the same."""

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
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Then what is said from now on, by new pods too.")
    ] = False,
    group: Annotated[int | None, typer.Option("--group", "-g", min=0, help="Only this replica group's.")] = None,
    rank: Annotated[int | None, typer.Option("--rank", "-r", min=0, help="Only this rank's, in each group.")] = None,
    since: Annotated[str | None, typer.Option("--since", help="Not older than this, like 30s or 2h.")] = None,
    tail: Annotated[int | None, typer.Option("--tail", min=0, help="Only so many lines of each pod.")] = None,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Print the logs of all pods and ranks, in order of time."""
    from megatron_operator.commands.errors import on_cluster
    from megatron_operator.commands.logs import LogRequest, Logs

    request = LogRequest(name, follow, group, rank, since, tail)
    access = _access(kubeconfig, context, namespace)
    on_cluster(access, lambda cluster, where: Logs(cluster, where, request, Console()).run())


def chat(
    name: Name,
    question: Annotated[str | None, typer.Argument(help="Asked once; without it, line after line is read.")] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="MEGATRON_API_KEY", help="Where the resource asks for one.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="What the model is told first.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="The longest answer.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0.0, help="0 takes the likeliest token each time.")] = None,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Talk to the model, by way of the API server; needs the right to create services/proxy."""
    from megatron_operator.commands.chat import Chat
    from megatron_operator.commands.errors import on_cluster

    given = {"max_tokens": max_tokens, "temperature": temperature}
    options = {field: value for field, value in given.items() if value is not None}
    access = _access(kubeconfig, context, namespace)
    on_cluster(access, lambda cluster, where: Chat(cluster, where, name, api_key, system, options).run(question))


def doctor(namespace: Namespace = None, context: Context = None, kubeconfig: Kubeconfig = None) -> None:
    """Look at the cluster for what is missing, and tell how to mend it; exit code 1 when something is."""
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
