"""The programs and images of a node, and the node itself."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from cluster_support import binaries
from cluster_support.progress import Say
from node_support import images, tools
from node_support.node import Node
from node_support.stage import Images

BUILT = Images(images.OPERATOR.name, images.SMOLLM2.name)
"""The images of every such node."""


class Prepared:
    """The programs of a node and the folder of images; created first, because that may take minutes.

    Raises ClusterSupportError.
    """

    def __init__(self, source: binaries.Binaries, env: Mapping[str, str], say: Say) -> None:
        self.source = source
        self.tools = tools.find_or_fetch(env, say)
        self.images = images.build(env, say, self.tools)

    @contextmanager
    def node(
        self, kubectl: Path, folder: Path, loaded: Sequence[images.Image] = (images.OPERATOR, images.SMOLLM2)
    ) -> Iterator[Node]:
        """A cluster of one node with these images."""
        with Node(self.source, kubectl, folder, self.tools) as node:
            for image in (images.PAUSE, *loaded):
                node.import_image(self.images / image.archive)
            yield node
