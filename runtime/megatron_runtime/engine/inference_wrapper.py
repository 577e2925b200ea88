"""A model with the context that it is served with, as Megatron's scripts pass it to the controller."""

from __future__ import annotations

from megatron_runtime.engine.context import DynamicInferenceContext
from megatron_runtime.errors import ConfigurationError
from megatron_runtime.model.decoder import Decoder


class GPTInferenceWrapper:
    """The first argument of a TextGenerationController, which takes a model without a wrapper too.

    Args:
        model: The model.
        inference_context: The context of the engine; None: it is not checked here.

    Raises:
        ConfigurationError: The model is no Decoder, or type or device of its context differ from its own.
    """

    def __init__(self, model: Decoder, inference_context: DynamicInferenceContext | None = None) -> None:
        if not isinstance(model, Decoder):
            raise ConfigurationError(
                f"model is a {type(model).__name__}; give the result of load_model, or of from_megatron for a GPTModel",
                field="model",
            )
        if inference_context is not None:
            cache = inference_context.kv_cache
            if (cache.dtype, cache.device.type) != (model.dtype, model.device.type):
                raise ConfigurationError(
                    f"inference_context has keys and values of {cache.dtype} on {cache.device}, but the model computes "
                    f"{model.dtype} on {model.device}; create it with dtype=model.dtype and device=model.device",
                    field="inference_context",
                )
        self.model = model
        self.inference_context = inference_context
