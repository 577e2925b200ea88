"""Fixtures that start `megatron-operator local`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from suite_support.console_runs import documented
from suite_support.doc_shell import DocShell
from suite_support.local_command import SAMPLE, LocalCommand, sample, until

LocalStarter = Callable[..., LocalCommand]


@pytest.fixture
def start_local(tmp_path: Path, smollm2_path: Path) -> Iterator[LocalStarter]:
    """Starts the command with the sample and changes; ends it after the test."""
    started: list[LocalCommand] = []

    def start(models: Path | None = smollm2_path.parent, **changes: Any) -> LocalCommand:
        started.append(LocalCommand.of_sample(tmp_path, models, **changes))
        return started[-1]

    yield start
    for command in started:
        command.close()


@pytest.fixture
def start_tiny(start_local: LocalStarter, tiny_checkpoint: Path) -> LocalStarter:
    """The same with a tiny model and one frontend per pod, for tests that do not depend on words."""
    source = {"path": f"/models/{tiny_checkpoint.name}"}
    return partial(start_local, tiny_checkpoint.parent, model={"source": source}, frontend={"replicas": 1})


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Iterator[LocalCommand]:
    """The sample with both replica groups, shared by the tests of a module; each restores it.

    The command is that of the docs, in a checkout whose sample can be edited.
    """
    folder = tmp_path_factory.mktemp("served")
    local, _ = documented("docs/command-line.md", "megatron-operator local")
    reader = DocShell(folder, TMPDIR=str(folder))
    reader.keep_models(smollm2_path.parent)
    file = reader.own("manifests") / "samples" / SAMPLE.name
    command = LocalCommand(file, sample(), reader.words(local.command), **reader.environment)
    try:
        command.wait_for("ready replicas: 2/2")
        yield command
    finally:
        command.close()


@pytest.fixture(scope="session")
def command_type() -> type[LocalCommand]:
    """For modules with their own shared command."""
    return LocalCommand


@pytest.fixture
def wait_until() -> Callable[..., Any]:
    """Polls a condition: ``wait_until(condition, what)``."""
    return until
