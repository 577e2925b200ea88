"""``spec.model``: the weights, their source, and the served name."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Self

from pydantic import ConfigDict, Field, model_validator

from megatron_operator.api.v1alpha1.base import (
    AbsolutePath,
    AdapterName,
    DnsName,
    ImageReference,
    Integer,
    Part,
    Text,
    misplaced,
    require_one,
)
from megatron_operator.api.v1alpha1.cache import Cache
from megatron_operator.api.v1alpha1.operations import ImagePullPolicy

ONE_SOURCE = (
    "exactly one of huggingFace, objectStorage, path, persistentVolumeClaim and image must say where the model is"
)
DOWNLOADED = "only models from source.huggingFace or source.objectStorage are downloaded; set one, or remove the cache"
NEEDS_CACHE = "is downloaded into a cache only; set spec.model.cache"


class DType(StrEnum):
    """The data type of the weights in memory; ``auto`` selects it for the checkpoint and the device."""

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
    """A repository of the Hugging Face hub, downloaded when a pod starts."""

    repo: Annotated[str, Field(max_length=256, pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*(/[A-Za-z0-9_.-]+)?$")]
    """Repository, like HuggingFaceTB/SmolLM2-135M-Instruct."""
    file: Annotated[str, Field(max_length=512, pattern=r"^[A-Za-z0-9_][A-Za-z0-9_./+-]*\.gguf$")] | None = None
    """A GGUF file of the repository; by default the whole repository, in the format of transformers."""
    revision: Text = "main"
    """Branch, tag or commit."""
    token_secret: SecretKey | None = None
    """Secret with an access token, for private and gated repositories."""


class ObjectStorageSource(Part):
    """A folder or GGUF file in object storage, downloaded into `model.cache`."""

    uri: Annotated[str, Field(max_length=1024, pattern=r"^(s3|gs)://[a-z0-9][a-z0-9._-]+(/[A-Za-z0-9_.=+/-]*)?$")]
    """s3://bucket/folder or gs://bucket/folder, or the .gguf file in it. Name a new folder for each version: changed
    objects of the same URI are not downloaded again."""
    credentials_secret: DnsName | None = None
    """Secret whose keys are variables of the download, such as AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION and
    AWS_ENDPOINT_URL, or GOOGLE_SERVICE_ACCOUNT_KEY. Default: those of podTemplate, or the identity of the pod."""


class VolumeSource(Part):
    """A folder or file on a volume claim, mounted read-only."""

    claim_name: DnsName
    """Name of the PersistentVolumeClaim, in the resource's namespace."""
    path: AbsolutePath = "/"
    """Path of the checkpoint from the root of the volume."""


class ImageSource(Part):
    """An OCI image or artifact with the model, mounted read-only. The cluster must support volumes of type image."""

    reference: ImageReference
    """The image, like registry.example.com/models/chat:1. It needs neither a shell nor a command; its files must be
    readable by everyone. The credentials are podTemplate.spec.imagePullSecrets."""
    path: AbsolutePath = "/"
    """Path of the checkpoint in the image."""
    pull_policy: ImagePullPolicy = ImagePullPolicy.IF_NOT_PRESENT
    """When the kubelet pulls the image: Always, IfNotPresent or Never."""


class Source(Part):
    """Source of the checkpoint: exactly one of the fields."""

    model_config = ConfigDict(
        json_schema_extra={
            "x-kubernetes-validations": [
                {
                    "rule": "(has(self.huggingFace) ? 1 : 0) + (has(self.objectStorage) ? 1 : 0)"
                    " + (has(self.path) ? 1 : 0)"
                    " + (has(self.persistentVolumeClaim) ? 1 : 0) + (has(self.image) ? 1 : 0) == 1",
                    "message": f"spec.model.source: {ONE_SOURCE}; set one",
                }
            ]
        }
    )

    hugging_face: HuggingFaceSource | None = None
    """A repository of the Hugging Face hub."""
    object_storage: ObjectStorageSource | None = None
    """A folder or file in object storage, of S3 or Google Cloud Storage. It needs model.cache."""
    path: AbsolutePath | None = None
    """An absolute path in the container: a GGUF file, or a folder with config.json and safetensors files or a
    torch_dist checkpoint of Megatron. The path is part of the image, or podTemplate mounts it."""
    persistent_volume_claim: VolumeSource | None = None
    """A folder or file on a volume claim."""
    image: ImageSource | None = None
    """A folder or file in an OCI image. Kubernetes supports this from 1.35 on, and from 1.31 on with the feature gate
    ImageVolume; otherwise the operator rejects it."""

    @property
    def is_downloaded(self) -> bool:
        """Whether the checkpoint is downloaded."""
        return self.hugging_face is not None or self.object_storage is not None

    @property
    def volume_path(self) -> str | None:
        """Path of the checkpoint on the mounted volume; None without a volume."""
        volume = self.persistent_volume_claim or self.image
        return volume.path if volume is not None else None

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        require_one(self, ONE_SOURCE)
        return self


class AdapterSpec(Part):
    """A LoRA adapter of the model."""

    name: AdapterName
    """Name of the adapter in requests, as their model; different from the name of the model."""
    path: AbsolutePath
    """An absolute path in the container: a folder with adapter_config.json and adapter_model.safetensors, as peft's
    save_pretrained writes them. It is part of the image, podTemplate mounts it, or it is below /models, where the
    volume of model.source.persistentVolumeClaim or model.source.image is mounted."""


class Model(Part):
    """The model that is served."""

    model_config = ConfigDict(
        json_schema_extra={
            "x-kubernetes-validations": [
                {
                    "rule": "!has(self.cache) || has(self.source.huggingFace) || has(self.source.objectStorage)",
                    "message": f"spec.model.cache: {DOWNLOADED}",
                },
                {
                    "rule": "!has(self.source.objectStorage) || has(self.cache)",
                    "message": f"spec.model.source.objectStorage: {NEEDS_CACHE}",
                },
            ]
        }
    )

    source: Source
    """Source of the checkpoint: exactly one of huggingFace, objectStorage, path, persistentVolumeClaim and image."""
    cache: Cache | None = None
    """A place that is filled once with the downloaded and verified model, for all pods. Default: each pod downloads the
    model for itself."""
    served_name: Text | None = None
    """Name of the model in the OpenAI API. Default: the resource's name."""
    dtype: DType = DType.AUTO
    """Data type of weights and KV cache: float32, bfloat16, float16, or auto: bfloat16 where the device supports it,
    float32 otherwise."""
    max_sequence_length: Annotated[Integer, Field(ge=1, le=16_777_216)] | None = None
    """Maximum length of prompt and answer, in tokens. Default: the limit of the checkpoint."""

    @model_validator(mode="after")
    def _downloads_are_cached(self) -> Self:
        if self.cache is not None and not self.source.is_downloaded:
            dumped = self.cache.model_dump(mode="json", by_alias=True, exclude_defaults=True)
            raise misplaced("cache", dumped, DOWNLOADED)
        if self.cache is None and self.source.object_storage is not None:
            raise misplaced("source.objectStorage", self.source.object_storage.uri, NEEDS_CACHE)
        return self
