"""The request of models that look at images, of which there are none here."""

from __future__ import annotations

from typing import Any

from megatron_runtime.errors import InvalidRequestError
from megatron_runtime.inference_request.request import InferenceRequest


class VLMInferenceRequest(InferenceRequest):
    """A name for code that tells requests apart; nothing is ever one.

    Raises:
        InvalidRequestError: Always: no model that is served here could do anything with its images.
    """

    def __init__(self, **_: Any) -> None:
        raise InvalidRequestError(
            "VLMInferenceRequest: the models that are served here read text only; make a DynamicInferenceRequest "
            "without images",
            field="imgs",
        )
