"""``megatron-operator``: the operator, the same resource without a cluster, the CRD, and user commands."""

from __future__ import annotations

import asyncio
import sys
from enum import StrEnum
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console

from megatron_operator.activator.limits import Limits
from megatron_operator.commands import cli_options
from megatron_operator.commands.console import OPERATOR, PLUGIN, program
from megatron_operator.kubernetes.lease import LeaseName, LeaseTimings
from megatron_operator.local.pod_manifest import PathMap
from megatron_operator.settings import LEASE_SECONDS_VARIABLE, LEASE_VARIABLE, WATCH_SILENCE_VARIABLE

if TYPE_CHECKING:
    from megatron_operator.activator.command import ActivatorOptions
    from megatron_operator.handlers import Options

INTERRUPTED = 130
BAD_USAGE = 2


class LogFormat(StrEnum):
    """Formats of the operator's log; both have time and level."""

    TEXT = "text"
    JSON = "json"


app = typer.Typer(
    name=OPERATOR,
    help="Serve language models with Megatron inference: one MegatronInference resource, one OpenAI endpoint.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"{program()} {version('megatron-inference')}")
        raise typer.Exit()


Version = Annotated[
    bool, typer.Option("--version", help="Print the version, and exit.", callback=_print_version, is_eager=True)
]


LogFormatOption = Annotated[LogFormat, typer.Option(envvar="MEGATRON_LOG_FORMAT", help="Format of log lines.")]


EndpointNamespace = Annotated[
    str, typer.Option(help="Namespace of the models at /v1. Default: that of --namespace, if there is one.")
]
Selector = Annotated[
    str, typer.Option(help="Label selector of the models at /v1 and /NAMESPACE/v1, like team=chat. Default: all.")
]
MaxRequests = Annotated[int, typer.Option(min=1, help="Requests that wait for models at a time; further ones get 503.")]
MaxBodyBytes = Annotated[int, typer.Option(min=1, help="Bytes of one body; larger ones get 413.")]
MaxTotalBodyBytes = Annotated[
    int, typer.Option(min=1, help="Bytes of the bodies of all requests at a time; further ones get 503.")
]
MaxConnections = Annotated[
    int, typer.Option(min=1, help="Connections of clients, at most half of the open files; further ones get 503.")
]
MaxAddressShare = Annotated[
    float,
    typer.Option(
        min=0.001,
        max=1,
        help="Part of --max-connections and --max-total-body-bytes that one IP address may have; 1 behind a proxy.",
    ),
]
MaxWait = Annotated[float, typer.Option(min=1, help="Seconds that a request waits for a model.")]
KeepAlive = Annotated[float, typer.Option(min=0.1, help="Seconds between comments in an event stream that waits.")]
HeadTimeout = Annotated[float, typer.Option(min=0.1, help="Seconds for a request's head to arrive.")]
BodyTimeout = Annotated[float, typer.Option(min=0.1, help="Seconds for a body to arrive; slower ones get 408.")]


@app.callback()
def _options(_version: Version = False) -> None:
    """Options before the command."""


@app.command()
def local(
    file: Annotated[
        Path,
        typer.Option(
            "--file", "-f", help="YAML file with one MegatronInference. Edits of the file take effect at once."
        ),
    ],
    map_path: Annotated[
        list[str] | None,
        typer.Option(
            "--map-path", metavar="PATH=FOLDER", help="Folder on this machine that stands for a path in the container."
        ),
    ] = None,
) -> None:
    """Serve a resource on this machine: the pods of a cluster, run as processes.

    Edits of the file take effect while the command runs. Ctrl-C stops everything.
    """
    sys.exit(asyncio.run(serve_locally(file, path_map(map_path or []), Console())))


@app.command()
def run(
    namespace: Annotated[
        list[str] | None,
        typer.Option("--namespace", "-n", help="Namespace to watch; may be repeated. Default: all namespaces."),
    ] = None,
    metrics_host: Annotated[str, typer.Option(help="Address of /metrics and /healthz.")] = "0.0.0.0",
    metrics_port: Annotated[
        int | None, typer.Option(help="Port of /metrics and /healthz; they are not served without it.")
    ] = None,
    lease: Annotated[
        str | None,
        typer.Option(
            metavar="NAMESPACE/NAME",
            envvar=LEASE_VARIABLE,
            help="Lease for leader election among several operators. Without it, run only one operator.",
        ),
    ] = None,
    lease_seconds: Annotated[
        int,
        typer.Option(
            min=1, envvar=LEASE_SECONDS_VARIABLE, help="Duration of the Lease; another operator takes over after that."
        ),
    ] = LeaseTimings.seconds,
    watch_silence: Annotated[
        int,
        typer.Option(
            min=1,
            envvar=WATCH_SILENCE_VARIABLE,
            help="Seconds without an event after which a watch restarts; the API server sends a bookmark each minute.",
        ),
    ] = 70,
    verbose: Annotated[bool, typer.Option("--verbose", help="Log every step.")] = False,
    log_format: LogFormatOption = LogFormat.TEXT,
) -> None:
    """Run the operator against the cluster of KUBECONFIG, or the cluster of this pod."""
    from megatron_operator import handlers

    try:
        name = LeaseName.parse(lease) if lease else None
    except ValueError as error:
        refuse(f"--lease {error}")
    namespaces = tuple(namespace or ())
    timings = LeaseTimings(lease_seconds)
    options = handlers.Options(namespaces, metrics_host, metrics_port, name, timings, watch_silence)
    _run_operator(options, verbose, log_format)


@app.command()
def activate(
    namespace: Annotated[
        list[str] | None,
        typer.Option("--namespace", "-n", help="Namespace to serve; may be repeated. Default: all namespaces."),
    ] = None,
    endpoint_namespace: EndpointNamespace = "",
    selector: Selector = "",
    host: Annotated[str, typer.Option(help="Address to serve on.")] = "0.0.0.0",
    port: Annotated[int, typer.Option(help="Port to serve on; /healthz is there too.")] = 8080,
    max_requests: MaxRequests = Limits.requests,
    max_body_bytes: MaxBodyBytes = Limits.body_bytes,
    max_total_body_bytes: MaxTotalBodyBytes = Limits.total_body_bytes,
    max_connections: MaxConnections = Limits.connections,
    max_address_share: MaxAddressShare = Limits.address_share,
    max_wait: MaxWait = Limits.wait,
    keep_alive: KeepAlive = Limits.keep_alive,
    head_timeout: HeadTimeout = Limits.head_timeout,
    body_timeout: BodyTimeout = Limits.body_timeout,
    drain_timeout: Annotated[float, typer.Option(min=0, help="Seconds that requests get to finish after SIGTERM.")] = (
        60.0
    ),
    metrics_port: Annotated[int | None, typer.Option(help="Port of /metrics; they are not served without it.")] = None,
    log_format: LogFormatOption = LogFormat.TEXT,
) -> None:
    """Pass requests on to models, and start those that were stopped because they were idle.

    The base URL of a model is http://HOST:PORT/NAMESPACE/NAME/v1, that of all models of a namespace, chosen by the
    model of a request, http://HOST:PORT/NAMESPACE/v1 or http://HOST:PORT/v1.
    """
    from megatron_operator.activator.command import ActivatorOptions
    from megatron_operator.activator.service import Served

    if namespace and endpoint_namespace and endpoint_namespace not in namespace:
        refuse(f"--endpoint-namespace {endpoint_namespace}: is not one of --namespace; add it there")
    limits = Limits(
        requests=max_requests,
        body_bytes=max_body_bytes,
        total_body_bytes=max_total_body_bytes,
        connections=max_connections,
        address_share=max_address_share,
        wait=max_wait,
        keep_alive=keep_alive,
        head_timeout=head_timeout,
        body_timeout=body_timeout,
    )
    served = Served(tuple(namespace or ()), endpoint_namespace, selector)
    _run_activator(ActivatorOptions(served, limits, host, port, metrics_port, drain_timeout), log_format)


def _run_activator(options: ActivatorOptions, log_format: LogFormat) -> None:
    from megatron_operator.activator import command
    from megatron_operator.observed_state import AdapterError

    try:
        command.run(options, json_log=log_format is LogFormat.JSON)
    except (AdapterError, OSError) as error:
        refuse(f"cannot start: {error}")


def _run_operator(options: Options, verbose: bool, log_format: LogFormat) -> None:
    from megatron_operator import handlers
    from megatron_operator.observed_state import AdapterError

    try:
        handlers.run(options, verbose=verbose, json_log=log_format is LogFormat.JSON)
    except AdapterError as error:
        refuse(f"cannot start: {error}; set KUBECONFIG, or run `megatron-operator local -f FILE` without a cluster")


@app.command()
def crd() -> None:
    """Print the CustomResourceDefinition, for kubectl apply -f -."""
    from megatron_operator.api.crd import crd_text

    print(crd_text(), end="")


cli_options.register(app)

plugin_app = typer.Typer(
    name=PLUGIN,
    help="Inspect and control the language models that MegatronInference resources serve.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
plugin_app.callback()(_options)
cli_options.register(plugin_app)


def path_map(words: list[str]) -> PathMap:
    """Parse ``PATH=FOLDER``. Exits with an error message when an entry is invalid."""
    paths = PathMap()
    for word in words:
        container_path, separator, here = word.partition("=")
        if not separator or not container_path.startswith("/"):
            refuse(f"--map-path {word}: must be like /models=FOLDER, with an absolute path on the left")
        folder = Path(here).expanduser().absolute()
        if not folder.exists():
            refuse(f"--map-path {word}: {folder} does not exist; create it or name another")
        paths = paths.plus(container_path, folder)
    return paths


def refuse(words: str) -> NoReturn:
    """Print what is wrong with the command line, and exit."""
    print(f"megatron-operator: {words}", file=sys.stderr)
    sys.exit(BAD_USAGE)


async def serve_locally(file: Path, paths: PathMap, console: Console) -> int:
    """Run a session with the view that fits the console; returns the exit code."""
    from megatron_operator.local.terminal import session_on

    with session_on(console, file, paths) as (session, _):
        return await session.run()


def main() -> None:
    """The console script ``megatron-operator``. Users' mistakes end in an error message, not in a traceback."""
    _run(app, OPERATOR)


def plugin() -> None:
    """The console script ``kubectl-megatron``; kubectl runs it as ``kubectl megatron``."""
    _run(plugin_app, PLUGIN)


def _run(chosen: typer.Typer, name: str) -> None:
    try:
        chosen(prog_name=name)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
