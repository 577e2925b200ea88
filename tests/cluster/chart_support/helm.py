"""Helm with the chart, in separate folders, independent of the user's repositories and plugins."""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cluster_support.errors import CommandFailedError
from suite_support import yaml_documents

Object = dict[str, Any]

ROOT = Path(__file__).parents[3]
CHART = ROOT / "charts" / "megatron-inference"
RELEASE = "megatron"
NAMESPACE = "megatron-system"
TIMEOUT = 120
REGISTRY = "--set=registry=localhost/megatron-inference"
"""The value that has no default, as in manifests/."""


class Helm:
    """``kubeconfig`` is the cluster of the releases; rendering needs none."""

    def __init__(self, program: Path, folder: Path, kubeconfig: Path | None = None) -> None:
        self.program = program
        self.folder = folder
        self._kubeconfig = kubeconfig

    def __call__(self, *words: str | Path) -> str:
        """Runs Helm in the root of the sources; returns its output. Raises CommandFailedError with its error."""
        command = [self.program, *words]
        done = subprocess.run(
            command, cwd=ROOT, env=self._env(), capture_output=True, text=True, timeout=TIMEOUT, check=False
        )
        if done.returncode != 0:
            said = f"{done.stdout.strip()}\n{done.stderr.strip()}"
            raise CommandFailedError(f"helm {' '.join(map(str, words))}: exit status {done.returncode}\n{said}")
        return done.stdout

    def template(self, *flags: str | Path, release: str = RELEASE, chart: Path = CHART) -> list[Object]:
        """The objects of a release, including its tests."""
        text = self("template", release, chart, "--namespace", NAMESPACE, REGISTRY, *flags)
        return [each for each in yaml_documents.load_all(text) if each]

    def _env(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("HELM_", "KUBE"))}
        homes = {f"HELM_{kind}_HOME": str(self.folder / kind.lower()) for kind in ("CACHE", "CONFIG", "DATA")}
        return {**kept, **homes, "KUBECONFIG": str(self._kubeconfig or os.devnull), "NO_PROXY": "127.0.0.1"}


def of_kind(objects: Sequence[Object], kind: str) -> list[Object]:
    return [each for each in objects if each["kind"] == kind]


def only(objects: Sequence[Object], kind: str) -> Object:
    """The only object of the kind."""
    (found,) = of_kind(objects, kind)
    return found
