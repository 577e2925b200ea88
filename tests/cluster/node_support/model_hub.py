"""A model hub in a pod, and resources that cache its model."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from cluster_support.cluster import wait_until
from node_support.node import Node
from node_support.stage import Stage
from operator_support.resource import Resource

MODEL = "/models/SmolLM2-135M-Instruct.Q4_1.gguf"
"""In the image of the runtime."""
PROGRAM = (
    (Path(__file__).parents[2] / "suite_support/loopback_hub.py").read_text()
    + """
import pathlib, sys
model = pathlib.Path(sys.argv[1])
hub = LoopbackHub("owner/model", {model.name: model.read_bytes()})
ThreadingHTTPServer(("0.0.0.0", 8080), type("Handler", (_Handler,), {"hub": hub})).serve_forever()
"""
)


class ModelHub:
    """A pod that serves the model of the image as ``owner/model``."""

    def __init__(self, node: Node, stage: Stage, namespace: str) -> None:
        flags = [f"--image={stage.images.runtime}", "--image-pull-policy=IfNotPresent", "--restart=Never"]
        command = ["--command", "--", "python3", "-c", PROGRAM, MODEL]
        node.kubectl("run", "hub", "-n", namespace, *flags, *command)
        self._node, self._namespace, self._address = node, namespace, ""
        wait_until(self._has_address, "the address of the hub")

    def _has_address(self) -> bool:
        pod = self._node.get("pod", "hub", "-n", self._namespace)
        self._address = pod["status"].get("podIP", "")
        return bool(self._address)

    @asynccontextmanager
    async def cached(self, name: str, cache: dict[str, Any]) -> AsyncIterator[Resource]:
        """A new resource whose model comes from the hub by way of this cache; deleted afterwards."""
        resource = Resource(self._node, self._namespace, name)
        variables = [{"name": "HF_ENDPOINT", "value": f"http://{self._address}:8080"}]
        source = {"huggingFace": {"repo": "owner/model", "file": Path(MODEL).name}}
        await resource.create(
            # Of float32, for which the image has compiled kernels.
            model={"source": source, "cache": cache, "servedName": "smollm2", "dtype": "float32"},
            engine={"kvCacheMemory": "64Mi"},
            podTemplate={"spec": {"containers": [{"name": "megatron", "env": variables}]}},
        )
        yield resource
        await resource.kubectl("delete", "mi", name, "--timeout=50s")

    async def stop(self) -> None:
        """Delete the pod, without waiting for its end."""
        words = ("delete", "pod", "hub", "-n", self._namespace, "--grace-period=1", "--wait=false")
        await asyncio.to_thread(self._node.kubectl, *words)
