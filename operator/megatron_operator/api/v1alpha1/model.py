"""``spec.model``: which weights are served, from where, and under which name."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Self

from pydantic import ConfigDict, Field, model_validator

from megatron_operator.api.v1alpha1.base import AbsolutePath, DnsName, ImageReference, Integer, Part, Text
from megatron_operator.api.v1alpha1.operations import ImagePullPolicy

ONE_SOURCE = "exactly one of huggingFace, path, persistentVolumeClaim and image says where the model is"


class DType(StrEnum):
    """The number format of the weights in memory; ``auto`` takes the one that suits checkpoint and device."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class SecretKey(Part):
    """One key of a Secret in the resource's namespace."""

    name: DnsName
    """Name of the Secret."""
    key: Text
    """Key within the Secret."""


class HuggingFaceSource(Part):
    """A repository of the Hugging Face hub; it is downloaded when a pod starts."""

    repo: Annotated[str, Field(max_length=256, pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*(/[A-Za-z0-9_.-]+)?$")]
    """Repository, like HuggingFaceTB/SmolLM2-135M-Instruct."""
    revision: Text = "main"
    """Branch, tag or commit."""
    token_secret: SecretKey | None = None
    """Secret with an access token, for private and gated repositories."""


class VolumeSource(Part):
    """A folder or file on a volume claim, mounted read-only."""

    claim_name: DnsName
    """Name of the PersistentVolumeClaim, in the resource's namespace."""
    path: AbsolutePath = "/"
    """Where the checkpoint is on the volume, from the volume's root."""


class ImageSource(Part):
    """An OCI image, or an artifact, with the model; mounted read-only where the cluster has volumes of type image."""

    reference: ImageReference
    """The image, like registry.example.com/models/chat:1. It needs neither a shell nor a command, but its files must be
    readable by everyone. Credentials are those of podTemplate.spec.imagePullSecrets."""
    path: AbsolutePath = "/"
    """Where the checkpoint is in the image."""
    pull_policy: ImagePullPolicy = ImagePullPolicy.IF_NOT_PRESENT
    """When the kubelet fetches the image: Always, IfNotPresent or Never."""


class Source(Part):
    """Where the checkpoint comes from: exactly one of the fields."""

    model_config = ConfigDict(
        json_schema_extra={
            "x-kubernetes-validations": [
                {
                    "rule": "(has(self.huggingFace) ? 1 : 0) + (has(self.path) ? 1 : 0)"
                    " + (has(self.persistentVolumeClaim) ? 1 : 0) + (has(self.image) ? 1 : 0) == 1",
                    "message": f"spec.model.source: {ONE_SOURCE}; set one",
                }
            ]
        }
    )

    hugging_face: HuggingFaceSource | None = None
    """A repository of the Hugging Face hub."""
    path: AbsolutePath | None = None
    """An absolute path inside the container: a GGUF file, or a folder with config.json and safetensors files or a
    torch_dist checkpoint of Megatron's. The image holds it, or podTemplate mounts it."""
    persistent_volume_claim: VolumeSource | None = None
    """A folder or file on a volume claim."""
    image: ImageSource | None = None
    """A folder or file in an OCI image. Kubernetes mounts images from 1.35 on, and from 1.31 on where the feature gate
    ImageVolume is set; elsewhere the operator refuses it."""

    @property
    def volume_path(self) -> str | None:
        """Where the checkpoint is on the volume that is mounted for it; None when there is no such volume."""
        volume = self.persistent_volume_claim or self.image
        return volume.path if volume is not None else None

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        given = [field.alias for name, field in type(self).model_fields.items() if getattr(self, name) is not None]
        if len(given) != 1:
            fix = f"not {' and '.join(map(str, given))}: remove all but one" if given else "and none is set: set one"
            raise ValueError(f"{ONE_SOURCE}, {fix}")
        return self


class Model(Part):
    """The model that is served."""

    source: Source
    """Where the checkpoint comes from: exactly one of huggingFace, path, persistentVolumeClaim and image."""
    served_name: Text | None = None
    """The model's name in the OpenAI API; the resource's name when left out."""
    dtype: DType = DType.AUTO
    """Number format of weights and cache: float32, bfloat16, float16, or auto: bfloat16 where the device computes in
    it, float32 elsewhere."""
    max_sequence_length: Annotated[Integer, Field(ge=1, le=16_777_216)] | None = None
    """Longest prompt plus answer, in tokens; what the checkpoint allows when left out."""
