"""The command ``megatron-serve`` in the process of a test, which keeps its environment and its log handlers."""

from __future__ import annotations

import os
from unittest.mock import patch

from click.testing import Result
from typer.testing import CliRunner

from megatron_runtime import cli
from megatron_runtime.launch.options import LaunchOptions


def invoke(*arguments: str) -> tuple[Result, list[LaunchOptions]]:
    """The result of the command, and the options of the launcher that it would run."""
    launched: list[LaunchOptions] = []
    with (
        patch.dict(os.environ),
        patch.object(cli, "configure_logging"),
        patch.object(cli, "_run", lambda options: launched.append(options) or 0),
    ):
        return CliRunner().invoke(cli.app, arguments), launched


def launch_options(*arguments: str) -> LaunchOptions:
    """The options of the launcher that the command runs."""
    done, launched = invoke(*arguments)
    assert done.exit_code == 0, done.output
    return launched[0]
