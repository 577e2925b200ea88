"""The default image of a running resource, which a new version of the operator does not change at once.

A pod that was created with the default image carries that image as an annotation. As long as nothing else in the spec
has changed, the resource keeps it until it gets its turn in the fleet rollout.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from megatron_operator import names
from megatron_operator.api.v1alpha1 import Lifecycle, MegatronInference
from megatron_operator.observed_state import ObservedPod, ObservedState


class ImageState(StrEnum):
    """How the pods of a resource relate to the operator's default image."""

    CURRENT = "current"
    """They have it, or the image of the spec, or there are none."""
    WAITING = "waiting"
    """They keep the default of an earlier operator."""
    PAUSED = "paused"
    """They keep it because ``spec.rollout.paused`` is set."""
    UPGRADING = "upgrading"
    """They are being replaced by pods with the current default."""


@dataclass(frozen=True)
class RuntimeImage:
    """The default image of new pods of a resource."""

    image: str
    state: ImageState


def runtime_image(
    resource: MegatronInference, observed: ObservedState, default: str, *, may_upgrade: bool
) -> RuntimeImage:
    """``default`` is the operator's image. Without ``may_upgrade`` a resource keeps an earlier one."""
    kept = [pod for pod in _with_default_image(resource, observed) if pod.default_image != default]
    if resource.spec.image is not None or resource.spec.lifecycle is Lifecycle.STOPPED or not kept:
        return RuntimeImage(default, ImageState.CURRENT)
    is_paused = resource.spec.rollout.paused
    has_begun = any(pod.default_image == default for pod in _with_default_image(resource, observed))
    if has_begun or (may_upgrade and not is_paused):
        return RuntimeImage(default, ImageState.UPGRADING)
    newest = max(kept, key=lambda pod: (pod.created_at, pod.name))
    assert newest.default_image is not None
    return RuntimeImage(newest.default_image, ImageState.PAUSED if is_paused else ImageState.WAITING)


def _with_default_image(resource: MegatronInference, observed: ObservedState) -> Iterator[ObservedPod]:
    """Pods whose template is that of the spec with the default image that they were created with."""
    hashes: dict[str, str] = {}
    for pod in observed.pods:
        if pod.default_image is not None:
            if pod.default_image not in hashes:
                hashes[pod.default_image] = names.template_hash(resource, pod.default_image)
            if pod.template_hash == hashes[pod.default_image]:
                yield pod
