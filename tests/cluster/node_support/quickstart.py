"""The quickstart of the README on a cluster of kind, with buildah and the node of the tests for Docker and kind."""

import os
from pathlib import Path

from cluster_support.cache import cache_folder
from cluster_support.errors import CommandFailedError
from cluster_support.reader import reader_of
from node_support import images
from node_support.images import ROOT
from node_support.node import Node
from node_support.prepared import Prepared
from suite_support.doc_blocks import doc_blocks

BEGIN = "kind create cluster"
"""The block with this line is the quickstart."""
SECONDS = 330
"""The longest command waits for five minutes."""


def commands() -> list[str]:
    """The commands of the block, one a line."""
    (block,) = (each for each in doc_blocks("bash") if BEGIN in each.text)
    return block.text.replace("\\\n", " ").splitlines()


class Quickstart:
    """Runs the commands in their order. bash expands them; Helm and kubectl are real.

    `docker build` is buildah with the same Dockerfile, folder and name, and its layers of earlier builds. `kind load`
    is the import into the node's containerd. The namespace of the kubeconfig is one of the tests.
    """

    def __init__(self, node: Node, prepared: Prepared, helm: Path, folder: Path) -> None:
        self._node, self._prepared = node, prepared
        self._rest = commands()
        self._reader = reader_of(node, folder / "reader", "default", helm)
        self._reader.environment["MODEL"] = str(cache_folder(os.environ) / "models" / images.MODEL)

    @property
    def is_complete(self) -> bool:
        """Whether all commands have run."""
        return not self._rest

    def use(self, namespace: str) -> None:
        """The namespace of the commands that name none."""
        self._reader.run(f"kubectl config set-context --current --namespace={namespace}")

    def run_until(self, begin: str) -> str:
        """Runs the next commands, up to one that begins like this, or all; returns what they print.

        Raises AssertionError if one fails, and CommandFailedError if it can't be run here.
        """
        printed = ""
        while self._rest and not self._rest[0].startswith(begin):
            printed += self._run(self._rest.pop(0))
        return printed

    def _run(self, command: str) -> str:
        match self._reader.run(f"printf '%s\\0' {command}").split("\0")[:-1]:
            case ["docker", "build", "-f", dockerfile, "-t", name, context]:
                self._build(dockerfile, name, context)
            case ["kind", "create", "cluster"]:
                assert self._node.is_node_ready()
            case ["kind", "load", "docker-image", *names]:
                for name in names:
                    self._node.import_image(self._prepared.images / _image(name).archive)
            case ["helm" | "kubectl", *_]:
                return self._reader.run(command, seconds=SECONDS)
            case _:
                raise CommandFailedError(f"{command}: the tests have nothing in its place")
        return ""

    def _build(self, dockerfile: str, name: str, context: str) -> None:
        image = _image(name)
        with images.builder(image, os.environ, self._prepared.tools) as builder:
            assert (dockerfile, (ROOT / context).resolve()) == (image.dockerfile, builder.context(image).resolve())
            builder.make(image)


def _image(name: str) -> images.Image:
    return {each.name: each for each in images.ALL}[name]
