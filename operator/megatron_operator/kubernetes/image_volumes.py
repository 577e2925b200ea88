"""Whether the cluster supports volumes of type image.

An API server that does not know the type accepts the pod and replaces the volume by an empty folder. One without the
feature gate drops the volume's only field and then rejects the volume for its missing type. The server's version does
not show which applies, so a dry run of a pod tests it.
"""

from __future__ import annotations

import http
from collections.abc import Mapping
from typing import Any

from megatron_operator.kubernetes.api_server import ApiServer, ServerRefusal
from megatron_operator.observed_state import ActionRefused

FIX = (
    "Kubernetes has them from 1.35 on, and from 1.31 on where the feature gate ImageVolume is set; upgrade the cluster"
    " or set the gate, or put the model on a persistentVolumeClaim"
)
NO_TYPE = "must specify a volume type"
"""Part of the API server's error about a volume without its only field."""

Object = Mapping[str, Any]


class ImageVolumes:
    """Support for image volumes in one cluster. Tested once per round until a dry run keeps the volume."""

    def __init__(self, api: ApiServer) -> None:
        self._api = api
        self._kept = False
        self._refusal: ActionRefused | None = None

    def look_again(self) -> None:
        """Test again in this round: the cluster may have been upgraded."""
        self._refusal = None

    async def check(self, pod: Object) -> None:
        """Raises ActionRefused when the pod would lose an image volume, and AdapterError."""
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
                return  # The pod exists already.
            if refusal.status != http.HTTPStatus.UNPROCESSABLE_ENTITY or NO_TYPE not in str(refusal):
                raise
        if not self._kept:
            words = ", ".join(str(image.get("reference")) for image in images.values())
            self._refusal = ActionRefused(f"image {words}: this API server has no volumes of type image; {FIX}")


def _images(pod: Object) -> dict[str, Object]:
    """The pod's image volumes, by name."""
    volumes = pod["spec"].get("volumes") or []
    return {volume["name"]: volume["image"] for volume in volumes if volume.get("image")}
