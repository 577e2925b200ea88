"""Whether the cluster has volumes that are images.

An API server that does not know them takes the pod, and gives it an empty folder instead; one whose feature gate is not
set takes the volume's only field away, and then complains of a volume without a type. Its version does not tell, so it
is asked, by a pod that is only tried.
"""

from __future__ import annotations

import http
from collections.abc import Mapping
from typing import Any

from megatron_operator.kubernetes.api_server import ApiServer, ServerRefusal
from megatron_operator.world import ActionRefused

FIX = (
    "Kubernetes has them from 1.35 on, and from 1.31 on where the feature gate ImageVolume is set; upgrade the cluster"
    " or set the gate, or put the model on a persistentVolumeClaim"
)
NO_TYPE = "must specify a volume type"
"""The API server's words about a volume that lost its only field."""

Object = Mapping[str, Any]


class ImageVolumes:
    """What one API server makes of them. It is asked once in a round, until it has kept one."""

    def __init__(self, api: ApiServer) -> None:
        self._api = api
        self._kept = False
        self._refusal: ActionRefused | None = None

    def look_again(self) -> None:
        """A new round: the cluster may have been upgraded since the last one."""
        self._refusal = None

    async def check(self, pod: Object) -> None:
        """Raises ActionRefused where the pod would lose an image among its volumes, and WorldError."""
        images = _images(pod)
        if not images or self._kept:
            return
        if self._refusal is None:
            await self._try(pod, images)
        if self._refusal is not None:
            raise self._refusal

    async def _try(self, pod: Object, images: Mapping[str, Object]) -> None:
        try:
            tried = await self._api.create(pod, dry_run=True)
            self._kept = _images(tried).keys() == images.keys()
        except ServerRefusal as refusal:
            if refusal.conflict:
                return  # It is there already, whatever became of its volumes.
            if refusal.status != http.HTTPStatus.UNPROCESSABLE_ENTITY or NO_TYPE not in str(refusal):
                raise
        if not self._kept:
            words = ", ".join(str(image.get("reference")) for image in images.values())
            self._refusal = ActionRefused(f"image {words}: this API server has no volumes of type image; {FIX}")


def _images(pod: Object) -> dict[str, Object]:
    """The pod's volumes that are images, by name."""
    volumes = pod["spec"].get("volumes") or []
    return {volume["name"]: volume["image"] for volume in volumes if volume.get("image")}
