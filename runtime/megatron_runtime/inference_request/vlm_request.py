"""The request of vision-language models, which are not supported."""

from __future__ import annotations

from typing import Any

from megatron_runtime.errors import InvalidRequestError
from megatron_runtime.inference_request.request import InferenceRequest


class VLMInferenceRequest(InferenceRequest):
    """Exists for code that checks types of requests; there are no instances.

    Raises:
        InvalidRequestError: Always: the supported models read text only.
    """

    def __init__(self, **_: Any) -> None:
        raise InvalidRequestError(
            "VLMInferenceRequest: the supported models read text only; use a DynamicInferenceRequest without images",
            field="imgs",
        )
