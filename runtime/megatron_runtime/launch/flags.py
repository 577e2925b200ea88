"""The flags of ``megatron-serve``, by what they set, and the options that they make."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from megatron_runtime.errors import ConfigurationError
from megatron_runtime.launch.engine_flags import EngineFlags, ModelFlags
from megatron_runtime.launch.identity import Identity
from megatron_runtime.launch.options import LaunchOptions
from megatron_runtime.launch.quantity import parse_bytes
from megatron_runtime.server.options import HttpOptions
from megatron_runtime.server.parsers import REASONING_PARSERS, TOOL_PARSERS
from megatron_runtime.wire.security import SHORTEST_SECRET

_Group = TypeVar("_Group")
Command = TypeVar("Command", bound=Callable[..., None])


@dataclass(frozen=True, kw_only=True)
class HttpFlags:
    """The OpenAI endpoint."""

    max_in_flight: Annotated[
        int, typer.Option(help="Answers in progress per frontend process; more requests get 429.")
    ] = HttpOptions.max_in_flight
    max_body: Annotated[str, typer.Option(help="Largest body of a request.")] = "16Mi"
    max_total_body: Annotated[
        str,
        typer.Option(
            help="Maximum size of the bodies of all requests in progress, per frontend process; half of it may come"
            " from one address. Beyond it, bodies get 503 or 429, except those of up to 32 KiB."
        ),
    ] = "256Mi"
    body_timeout: Annotated[float, typer.Option(help="Seconds that the body of a request may take to arrive.")] = (
        HttpOptions.body_timeout
    )
    cors_origin: Annotated[
        list[str] | None, typer.Option(help="Origin whose pages may read answers, or *; may be repeated.")
    ] = None
    access_log: Annotated[str, typer.Option(help="A line per request: off, text or json.")] = HttpOptions.access_log
    parsers: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Parser of tool calls ({', '.join(TOOL_PARSERS)}; default: as the chat template shows)"
            f" or of reasoning ({', '.join(REASONING_PARSERS)}; default: none but for gpt-oss);"
            " a name of both kinds parses both; may be repeated."
        ),
    ] = None
    media_placeholder: Annotated[
        bool,
        typer.Option(
            "--media-placeholder",
            help="Replace images, audio, videos and files of messages by a text like [image] instead of refusing them.",
        ),
    ] = HttpOptions.media_placeholder
    page: Annotated[bool, typer.Option(help="Serve a page at / to chat with the model and to watch the service.")] = (
        HttpOptions.page
    )
    shared_prefix_cache: Annotated[
        bool,
        typer.Option(
            "--shared-prefix-cache",
            help="Let requests with different API keys use each other's cached prefixes, by which their users can find"
            " out what the others asked.",
        ),
    ] = HttpOptions.shared_prefix_cache
    picker_metrics_without_key: Annotated[
        bool,
        typer.Option(
            "--picker-metrics-without-key",
            help="Serve the load for endpoint pickers at /metrics to requests without an API key: queue, batch and use"
            " of the KV cache, without names of adapters. All other metrics need a key.",
        ),
    ] = HttpOptions.picker_metrics_without_key
    megatron_http: Annotated[
        bool,
        typer.Option("--megatron-http", help="Accept requests as Megatron's server does, for any model name."),
    ] = HttpOptions.megatron_http
    generation_config: Annotated[
        str,
        typer.Option(
            help="Sampling defaults: auto (generation_config.json of the checkpoint), vllm (none), or the path of such"
            " a file or its folder."
        ),
    ] = HttpOptions.generation_config
    pooling: Annotated[
        str, typer.Option(help="Hidden states of /v1/embeddings and /v1/score: last (of the last token) or mean.")
    ] = HttpOptions.pooling
    trust_request_chat_template: Annotated[
        bool,
        typer.Option(
            "--trust-request-chat-template",
            help="Accept the chat templates of requests: programs without limits of time and memory.",
        ),
    ] = HttpOptions.trust_request_chat_template
    tls_cert: Annotated[
        Path | None, typer.Option(help="PEM file with a certificate; the OpenAI endpoint then uses HTTPS.")
    ] = None
    tls_key: Annotated[Path | None, typer.Option(help="PEM file with the private key of --tls-cert.")] = None

    def options(self) -> HttpOptions:
        """The same as options; ConfigurationError names a flag whose value can't be parsed."""
        return HttpOptions(
            max_body_bytes=parse_bytes(self.max_body, "--max-body"),
            max_total_body_bytes=parse_bytes(self.max_total_body, "--max-total-body"),
            body_timeout=self.body_timeout,
            max_in_flight=self.max_in_flight,
            cors_origins=tuple(self.cors_origin or ()),
            access_log=self.access_log,
            parsers=tuple(self.parsers or ()),
            media_placeholder=self.media_placeholder,
            page=self.page,
            shared_prefix_cache=self.shared_prefix_cache,
            picker_metrics_without_key=self.picker_metrics_without_key,
            megatron_http=self.megatron_http,
            generation_config=self.generation_config,
            pooling=self.pooling,
            trust_request_chat_template=self.trust_request_chat_template,
            tls_cert=None if self.tls_cert is None else str(self.tls_cert),
            tls_key=None if self.tls_key is None else str(self.tls_key),
        )


@dataclass(frozen=True, kw_only=True)
class AccessFlags:
    """The secrets of clients; variables of the environment have the same for pods."""

    api_key: Annotated[
        list[str] | None,
        typer.Option(
            help="Key that clients of the OpenAI endpoint have to send; may be repeated. Other users of the machine see"
            " it in the list of processes: prefer --api-keys-file."
        ),
    ] = None
    api_keys_file: Annotated[
        Path | None, typer.Option(help="File with such keys, one per line; changes take effect at once.")
    ] = None
    control_token_file: Annotated[
        Path | None,
        typer.Option(help="File with the token that clients of the control API have to send. Default: a random one."),
    ] = None

    def identity(self, environment: Mapping[str, str]) -> Identity:
        """The identity of the pod with these secrets; ConfigurationError names a flag or variable that is invalid."""
        identity = Identity.from_environment(environment)
        keys = tuple(self.api_key or ())
        if any(not key or key.split() != [key] for key in keys):
            raise ConfigurationError("--api-key: must not be empty or contain spaces")
        return replace(
            identity,
            api_keys=keys,
            api_keys_file=self.api_keys_file or identity.api_keys_file,
            control_token=self._control_token() or identity.control_token,
        )

    def _control_token(self) -> str | None:
        path = self.control_token_file
        if path is None:
            return None
        try:
            token = path.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise ConfigurationError(f"--control-token-file {path}: can't be read: {reason}") from error
        if len(token) < SHORTEST_SECRET or token.split() != [token] or not token.isascii():
            raise ConfigurationError(
                f"--control-token-file {path}: must be one line of {SHORTEST_SECRET} or more characters without spaces,"
                " such as the output of: openssl rand -hex 32"
            )
        return token


@dataclass(frozen=True, kw_only=True)
class PodFlags:
    """The processes of the pod; the fields are those of LaunchOptions."""

    served_name: Annotated[str | None, typer.Option(help="Name of the model in requests.")] = None
    replica_groups: Annotated[int, typer.Option(help="Number of replica groups, for a standalone run.")] = (
        LaunchOptions.replica_groups
    )
    ranks_per_pod: Annotated[
        int | None, typer.Option(help="Ranks of a replica group that one pod runs. Default: all.")
    ] = None
    threads_per_rank: Annotated[int | None, typer.Option(help="Default: the cores, shared by the ranks.")] = None
    routing_policy: Annotated[
        str,
        typer.Option(
            help="round-robin, load-balanced, first-prefix-block, longest-prefix, or auto: longest-prefix with prefix "
            "caching, load-balanced without."
        ),
    ] = LaunchOptions.routing_policy
    routing_alpha: Annotated[float, typer.Option(help="Weight of the prefix against the load, 0 to 1.")] = (
        LaunchOptions.routing_alpha
    )
    frontend_replicas: Annotated[int, typer.Option(help="Number of frontend processes.")] = (
        LaunchOptions.frontend_replicas
    )
    request_timeout: Annotated[float, typer.Option(help="Seconds that a request may take.")] = (
        LaunchOptions.request_timeout
    )
    drain_timeout: Annotated[float, typer.Option(help="Seconds that requests get to finish after SIGTERM.")] = (
        LaunchOptions.drain_timeout
    )
    auto_suspend_after: Annotated[
        float,
        typer.Option(help="Seconds without a request after which engines are suspended until the next; 0: never."),
    ] = LaunchOptions.auto_suspend_after
    max_restarts: Annotated[int, typer.Option(help="Restarts of failed ranks before the launcher gives up.")] = (
        LaunchOptions.max_restarts
    )
    restart_reset_after: Annotated[
        float, typer.Option(help="Seconds without a restart after which the budget of restarts is reset.")
    ] = LaunchOptions.restart_reset_after
    hang_timeout: Annotated[
        float,
        typer.Option(
            help="Seconds without a heartbeat after which a process counts as hung and is replaced; at most 8 for "
            "the coordinator and 10 for frontends."
        ),
    ] = LaunchOptions.hang_timeout
    rendezvous_timeout: Annotated[
        float, typer.Option(help="Seconds within which all ranks of a replica group have to connect.")
    ] = LaunchOptions.rendezvous_timeout
    host: Annotated[str | None, typer.Option(help="Address of the OpenAI endpoint.")] = None
    port: Annotated[int | None, typer.Option(help="Port of the OpenAI endpoint; 0: any free one. Default: 8000.")] = (
        None
    )
    control_port: Annotated[int | None, typer.Option(help="Port of the control API. Default: 9000.")] = None
    metrics_port: Annotated[int | None, typer.Option(help="Port of /metrics. Default: 9001.")] = None
    coordinator_port: Annotated[int | None, typer.Option(help="Port of the coordinator. Default: 5557.")] = None


GROUPS = (ModelFlags, EngineFlags, HttpFlags, AccessFlags, PodFlags)


def with_flags(command: Command) -> Command:
    """Gives a typer command the flags of all groups as parameters, beside those that it declares itself."""
    own = inspect.signature(command, eval_str=True).parameters.values()
    parameters = [parameter for group in GROUPS for parameter in _parameters(group)]
    parameters += [parameter for parameter in own if parameter.kind is not inspect.Parameter.VAR_KEYWORD]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def launch_options(values: Mapping[str, Any], environment: Mapping[str, str]) -> LaunchOptions:
    """The options of a pod from the values of all flags and the environment.

    Raises:
        ConfigurationError: A flag or a variable can't be parsed; the message names it.
    """
    return LaunchOptions(
        model=_group(ModelFlags, values).source(),
        identity=_group(AccessFlags, values).identity(environment),
        engine=_group(EngineFlags, values).options(),
        http=_group(HttpFlags, values).options(),
        **vars(_group(PodFlags, values)),
    )


def _parameters(group: type) -> Iterator[inspect.Parameter]:
    annotations = get_type_hints(group, include_extras=True)
    for field in fields(group):
        yield inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=annotations[field.name]
        )


def _group(group: type[_Group], values: Mapping[str, Any]) -> _Group:
    return group(**{field.name: values[field.name] for field in fields(group)})  # type: ignore[arg-type]
