"""A service of several pods under `megatron-operator local`, for the trials that harm its processes."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from suite_support.local_command import LocalCommand, told_by_kernel

NAME = "chat"
LAUNCHERS = "megatron-serve"
"""In the command line of each pod's launcher."""
LAST_LINES = 40


class LocalService:
    """A resource whose pods run as processes, with a tiny checkpoint.

    It has what `chaos_trial` expects of a pod, so it takes the place of one there.
    """

    def __init__(self, folder: Path, checkpoint: Path, spec: Mapping[str, Any]) -> None:
        self._replicas = int(spec["replicas"])
        resource = {
            "apiVersion": "inference.megatron.dev/v1alpha1",
            "kind": "MegatronInference",
            "metadata": {"name": NAME},
            "spec": {
                **spec,
                "model": {"source": {"path": f"/models/{checkpoint.name}"}, "servedName": NAME, "dtype": "float32"},
            },
        }
        file = folder / "resource.yaml"
        program = [sys.executable, "-m", "megatron_operator.cli", "local", "-f", file]
        program += ["--map-path", f"/models={checkpoint.parent}"]
        self.command = LocalCommand(file, resource, program, TMPDIR=str(folder))

    def wait_ready(self) -> None:
        """Returns when all replica groups are ready."""
        self.command.wait_for(f"ready replicas: {self._replicas}/{self._replicas}")

    @property
    def url(self) -> str:
        """Base URL of the OpenAI endpoint."""
        return self.command.url

    @property
    def coordinator(self) -> str:
        """Address of the coordinator's Service."""
        return self._variable("MEGATRON_COORDINATOR_ADDRESS")

    @property
    def key(self) -> str:
        """The key of the coordinator."""
        return self._variable("MEGATRON_COORDINATOR_KEY")

    def processes(self, word: str) -> list[int]:
        """Running processes whose command line has ``word``."""
        return self.command.processes(word)

    def launchers(self) -> list[int]:
        """The launchers of the pods."""
        return self.command.processes(LAUNCHERS)

    def words(self) -> str:
        """The end of the output."""
        return "\n".join(self.command.lines[-LAST_LINES:])

    def end(self) -> None:
        """Ends all processes."""
        self.command.close()

    def _variable(self, name: str) -> str:
        """Of the environment of a launcher."""
        variables = told_by_kernel(self.launchers()[0], "environ").decode().split("\0")
        return next(value for key, _, value in (each.partition("=") for each in variables) if key == name)
