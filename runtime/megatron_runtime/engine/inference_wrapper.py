"""A model with the context that it is served with, as Megatron's scripts pass it to the controller."""

from __future__ import annotations

from typing import Any

from torch import nn

from megatron_runtime.engine.context import DynamicInferenceContext
from megatron_runtime.errors import ConfigurationError
from megatron_runtime.model.decoder import Decoder
from megatron_runtime.model.kv_cache import FLOAT8
from megatron_runtime.model.megatron import from_megatron, is_megatron_model
from megatron_runtime.model.tokenizer import Tokenizer


class GPTInferenceWrapper:
    """The first argument of a TextGenerationController, which takes a model without a wrapper too.

    Args:
        model: A model from `load_model`, or a live GPTModel of Megatron Core, which is served in place.
        inference_context: The context of the engine; None: it is not checked here.

    Raises:
        ConfigurationError: The model is neither.
    """

    def __init__(self, model: Decoder | nn.Module, inference_context: DynamicInferenceContext | None = None) -> None:
        if not isinstance(model, Decoder) and not is_megatron_model(model):
            raise ConfigurationError(
                f"model is a {type(model).__name__}; give the result of load_model, or a GPTModel of Megatron Core",
                field="model",
            )
        self.model = model
        self.inference_context = inference_context

    def served(self, tokenizer: Any) -> tuple[Decoder, Tokenizer]:
        """The model and the tokenizer for an engine; with a GPTModel, arguments and errors as for `from_megatron`.

        Raises:
            ConfigurationError: Type or device of the context differ from those of the model.
        """
        model = self.model
        if not isinstance(model, Decoder):
            model, tokenizer = from_megatron(model, tokenizer)
        context = self.inference_context
        if context is not None and context.is_allocated:
            cache = context.kv_cache
            if cache.dtype not in (model.dtype, FLOAT8) or cache.device.type != model.device.type:
                raise ConfigurationError(
                    f"inference_context has keys and values of {cache.dtype} on {cache.device}, but the model computes "
                    f"{model.dtype} on {model.device}; create it with dtype=model.dtype and device=model.device",
                    field="inference_context",
                )
        return model, tokenizer
