"""The memory of an engine that a suspension releases: KV cache, weights, and the CUDA graphs over them."""

from __future__ import annotations

import logging

import torch

from megatron_runtime.config import KVCacheManagementMode
from megatron_runtime.engine.batch_invariance import make_batch_invariant
from megatron_runtime.engine.context import DynamicInferenceContext
from megatron_runtime.engine.pass_graphs import capture_obstacle, make_pass_graphs
from megatron_runtime.engine.text_generation_controller import TextGenerationController
from megatron_runtime.errors import ConfigurationError, EngineError
from megatron_runtime.model.decoder import Decoder
from megatron_runtime.model.device_memory import (
    address_obstacle,
    describe_shortage,
    format_gibibytes,
    is_device_shortage,
)
from megatron_runtime.model.kv_cache import FLOAT8
from megatron_runtime.model.refit import (
    Weights,
    find_weights_again,
    keep_places,
    offload_weights,
    restore_weights,
    update_weights,
)
from megatron_runtime.parallel.timeouts import LOAD_TIMEOUT
from megatron_runtime.processes.allocator import return_freed_memory

_logger = logging.getLogger(__name__)


class EngineMemory:
    """Moves memory as the configuration of the context asks for, and captures graphs again where tensors have moved.

    Args:
        controller: Has the model.
        context: The KV cache.

    Raises:
        ConfigurationError: As `make_batch_invariant`, `keep_places`, `make_pass_graphs` and `PassGraphs`; or the
            attention does not support the type of the KV cache.
        EngineError: As `keep_places`.
    """

    def __init__(self, controller: TextGenerationController, context: DynamicInferenceContext) -> None:
        self._controller = controller
        self._context = context
        if controller.model.flashinfer is not None and context.kv_cache.dtype is FLOAT8:
            raise ConfigurationError(
                "kv_cache_dtype='fp8': the model has FlashInfer's attention, which is not supported with fp8; "
                "use 'auto', or load the model without attention_backend",
                field="kv_cache_dtype",
            )
        self._batch_invariant = context.config.batch_invariant
        if self._batch_invariant:
            make_batch_invariant(controller.model, context.kv_cache)
        if context.config.offload_weights:
            for model in self._models:
                keep_places(model, context.device)
        self.graphs = make_pass_graphs(controller.model, context)
        """None: every pass runs eagerly."""
        if self.graphs is not None and self._moves and (obstacle := address_obstacle(context.device)) is not None:
            _logger.info("a suspension drops the CUDA graphs, which are then captured again: %s", obstacle)
        self.capture_stats: dict[str, float] | None = None
        """Of the last capture, as from `PassGraphs.capture`."""
        self._capture()

    def release(self) -> None:
        """Release it for a suspension. No pass is in flight; after RECOMPUTE, no sequence owns blocks."""
        mode, offloads = self._context.config.kv_cache_management_mode, self._context.config.offload_weights
        if self.graphs is not None and self._moves:
            self.graphs.release()
        if mode is KVCacheManagementMode.OFFLOAD:
            for cache in self._context.caches:
                cache.offload(self._context.allocator.held())
        elif mode is KVCacheManagementMode.RECOMPUTE:
            for cache in self._context.caches:
                cache.release()
        if offloads:
            for model in self._models:
                offload_weights(model)
        if self._context.device.type == "cuda":
            torch.cuda.empty_cache()
        else:
            return_freed_memory()

    def restore(self) -> None:
        """Undo `release`.

        Raises:
            CheckpointError: Released weights can't be read again.
            EngineError: The GPU has too little memory. All is released again, for another call.
        """
        device = self._context.device
        try:
            self._restore()
        except (RuntimeError, ConfigurationError) as error:
            cause = error.__cause__ if isinstance(error, ConfigurationError) else error  # the first from a capture
            if cause is None or not is_device_shortage(cause):
                raise
            shortage = describe_shortage("while the engine resumed", device, cause)
            self.release()
            raise EngineError(
                f"{shortage}; it needs {format_gibibytes(self._num_bytes)} for what the suspension has released. "
                "End the programs that have taken this memory, or start the engine with a lower --kv-cache-memory"
            ) from error

    def _restore(self) -> None:
        if self._context.config.offload_weights:
            for model in self._models:
                restore_weights(model, self._context.device)
        if self._moves:
            for model in self._models:
                find_weights_again(model)  # The owner of a live model may have moved them.
        for cache in self._context.caches:
            cache.restore()
        self._capture()

    def update_weights(self, weights: Weights) -> None:
        """As `refit.update_weights`; those of a live model are other tensors than before."""
        update_weights(self._controller.model, weights)
        if self._batch_invariant:
            make_batch_invariant(self._controller.model, self._context.kv_cache)
        if self.graphs is not None and self._controller.model.is_shared:
            self.graphs.release()
            if self._context.kv_cache.is_resident:
                self._capture()

    @property
    def _models(self) -> list[Decoder]:
        """The model, and the draft model if that is another one."""
        model, draft = self._controller.model, self._context.config.speculative_draft_model
        return [model] if draft is None or draft is model else [model, draft]

    @property
    def _moves(self) -> bool:
        """Whether a suspension moves memory whose addresses graphs have."""
        config, model = self._context.config, self._controller.model
        blocks = config.kv_cache_management_mode is not KVCacheManagementMode.PERSIST
        # The owner of a live model may move its weights meanwhile.
        return (
            (blocks and not self._context.kv_cache.keeps_addresses)
            or (config.offload_weights and model.places is None)
            or model.is_shared
        )

    @property
    def _num_bytes(self) -> int:
        """Of what a suspension releases."""
        config, count = self._context.config, 0
        if config.kv_cache_management_mode is not KVCacheManagementMode.PERSIST:
            count += sum(cache.num_bytes for cache in self._context.caches)
        if config.offload_weights:
            weights = (each for model in self._models for each in model.parameters())
            count += sum(each.numel() * each.element_size() for each in weights)
        return count

    def _capture(self) -> None:
        """Unless the graphs have been kept, or the weights of a live model permit none."""
        if self.graphs is None or self.graphs.sizes:
            return
        if capture_obstacle(self._controller.model, self._context) is None:
            ranks = self._controller.model.ranks
            self.capture_stats = ranks.supervise(self.graphs.capture, LOAD_TIMEOUT)
