"""Passes as CUDA graphs: the host starts a whole pass, and its sampling, by one launch each.

A graph is captured for each of several sizes, over tensors that stay where they are. A pass runs on the graph of the
smallest size that its tokens and requests fit; the others are padding, which writes nothing into the KV cache.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Sequence as Slices
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_runtime.engine.context import DynamicInferenceContext
from megatron_runtime.engine.context_limits import ContextLimits
from megatron_runtime.engine.graph_inputs import GraphInputs, is_decode_pass, needs_last_logits
from megatron_runtime.engine.graph_sizes import GraphSize, graph_sizes
from megatron_runtime.engine.packed_arrays import on_device
from megatron_runtime.engine.sampling.gpu_edits import GpuEdits
from megatron_runtime.engine.sampling.gpu_sampler import TRUNCATION_FIELDS
from megatron_runtime.engine.sampling.sampling_table import SamplingRules
from megatron_runtime.engine.scheduling.sequence import SequenceSlice
from megatron_runtime.engine.sequence_rows import SampledTokens
from megatron_runtime.errors import ConfigurationError
from megatron_runtime.model.decoder import Decoder
from megatron_runtime.model.device_memory import GENERAL_REMEDY, naming_device_memory
from megatron_runtime.model.experts import Experts
from megatron_runtime.model.forward_batch import ForwardBatch
from megatron_runtime.model.kernels.gpu_attention import has_gpu_attention

if TYPE_CHECKING:
    from megatron_runtime.gpu.arriving_tokens import ArrivingTokens, TokenCopies

_logger = logging.getLogger(__name__)

_REMEDY = f"use --num-cuda-graphs 0, or {GENERAL_REMEDY}"


class CapturedPass:
    """A pass that is begun, of which S requests sample; samples them as `sampler.TokenSampler`."""

    def __init__(
        self,
        logits: Tensor,
        tokens: Tensor,
        sampling: torch.cuda.CUDAGraph | None,
        edits: GpuEdits | None,
        there: dict[str, Tensor],
        copies: TokenCopies,
    ) -> None:
        self.logits = logits
        """float32 [S, vocab], valid until the next pass."""
        self._tokens = tokens
        self._sampling = sampling
        self._edits = edits
        self._there = there
        self._copies = copies

    def edit_(self, logits: Tensor) -> None:
        """Apply edits and penalties to the logits of this pass, once."""
        if self._edits is not None:
            self._edits.apply_(logits, self._there, self._tokens)

    def sample(self, logits: Tensor) -> Tensor:
        """int64 [S], one token for each row of the logits of this pass; valid until the next pass."""
        assert logits is self.logits, "the graph samples its own logits"
        if self._sampling is not None:
            self._sampling.replay()
        return self._tokens

    @torch.inference_mode()
    def begin_sampling(self) -> ArrivingTokens:
        """The same after edits and penalties: the tokens come later, those of this pass first."""
        self.edit_(self.logits)
        self.sample(self.logits)
        return self._copies.begin()


def buffer_bytes(limits: ContextLimits, vocab_size: int) -> int:
    """Nearly all bytes of the tensors that graphs of up to ``limits.max_requests`` requests work on: logits, and block
    tables."""
    return 4 * limits.max_requests * (vocab_size + limits.max_blocks_per_sequence)


def make_pass_graphs(model: Decoder, context: DynamicInferenceContext) -> PassGraphs | None:
    """The graphs that the configuration of the context asks for, not captured yet; None for none.

    Raises:
        ConfigurationError: A number of graphs is asked for that the model or its device does not permit.
    """
    config = context.config
    sizes = graph_sizes(config, context.max_requests, context.max_tokens)
    if not sizes:
        return None
    if (obstacle := capture_obstacle(model, context)) is None:
        return PassGraphs(model, context, sizes)
    if config.num_cuda_graphs == -1:
        _logger.info("every pass runs eagerly, without CUDA graphs: %s", obstacle)
        return None
    raise ConfigurationError(
        f"num_cuda_graphs={config.num_cuda_graphs}: {obstacle}; leave it out, or set -1 to use graphs where they are "
        "possible",
        field="num_cuda_graphs",
    )


def capture_obstacle(model: Decoder, context: DynamicInferenceContext) -> str | None:
    """Why passes of this model can't be captured; None if they can."""
    if model.device.type != "cuda":
        return f"the model is on the device {model.device.type}"
    sizes = model.ranks.position.sizes
    if sizes.pipeline > 1:
        return f"the model is divided among {sizes.pipeline} pipeline stages, whose communication is not captured"
    if sizes.expert > sizes.tensor:
        return f"only {sizes.tensor} of {sizes.expert} expert parallel ranks compute logits, and sample"
    if model.flashinfer is not None:
        return "the host plans FlashInfer's attention for each pass"
    if not has_gpu_attention(context.kv_cache):
        return "its attention has no kernel of this project, and PyTorch's depends on values on the host"
    if model.config.recurrent is not None:
        return "it has recurrent layers, whose computation is not captured"
    for module in model.modules():
        if isinstance(module, Experts) and isinstance(obstacle := module.grouped(), str):
            return f"the host has to know which experts a pass has chosen, because {obstacle}"
    if context.config.moe_enable_routing_replay:
        return "the host records which experts a pass has chosen"
    return None


class PassGraphs:
    """The graphs of one engine, and the tensors that they work on.

    Args:
        model: The model, of which this rank has all layers.
        context: The KV cache, and the tables of the running sequences.
        sizes: As from `graph_sizes`.

    Raises:
        ConfigurationError: The memory of the device does not suffice.
    """

    def __init__(self, model: Decoder, context: DynamicInferenceContext, sizes: Slices[GraphSize]) -> None:
        from megatron_runtime.gpu.arriving_tokens import TokenCopies
        from megatron_runtime.gpu.persistent_arrays import PersistentArrays

        self._model = model
        self._context = context
        self._sizes = sizes
        self._graphs: dict[GraphSize, torch.cuda.CUDAGraph] = {}
        """Of the model."""
        self._samplers: dict[int, torch.cuda.CUDAGraph] = {}
        """By number of requests."""
        largest = max(size.requests for size in sizes)
        device, tables = model.device, context.block_tables
        self._inputs = GraphInputs(tables, context.max_requests, GraphSize(max(size.tokens for size in sizes), largest))
        with naming_device_memory("for the buffers of CUDA graphs", device, remedy=_REMEDY):
            self._arrays = PersistentArrays(self._inputs.fields, device, model.ranks.await_device)
            self._flat_tables = torch.zeros((context.max_requests + 1) * tables.width, dtype=torch.int32, device=device)
            self._tables = self._flat_tables.view(-1, tables.width)
            self._logits = torch.zeros(largest, model.config.vocab_size, device=device)
            self._tokens = torch.zeros(largest, dtype=torch.int64, device=device)
            self._copies = TokenCopies(self._tokens, model.ranks.await_device)
            self._starts = torch.arange(largest + 1, dtype=torch.int32, device=device)

    @property
    def sizes(self) -> list[GraphSize]:
        """The sizes that are captured, ascending."""
        return sorted(self._graphs)

    @torch.inference_mode()
    def capture(self) -> dict[str, float]:
        """Capture all graphs, which run once. The weights and the KV cache have to stay where they are until `release`.

        Returns:
            The seconds that it took, and the memory of the device: ``time``, ``allocated_bytes``, ``reserved_bytes``.
        """
        from megatron_runtime.gpu.graphs import GraphRecorder

        device, started = self._model.device, time.perf_counter()
        before = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
        self._inputs.write_nothing(self._arrays.host_arrays())
        self._arrays.send()
        gc.collect()  # Memory that is freed during a capture can't be returned to the driver.
        with naming_device_memory("while it captured CUDA graphs", device, remedy=_REMEDY):
            recorder = GraphRecorder(device, self._model.ranks.await_device)
            for size in reversed(self._sizes):  # so that smaller ones fit the memory of the largest one
                self._graphs[size] = recorder.record(partial(self._forward, size))
                if not size.has_prompts:
                    self._samplers[size.requests] = recorder.record(partial(self._sample, size.requests))
        return {
            "time": time.perf_counter() - started,
            "allocated_bytes": torch.cuda.memory_allocated(device) - before[0],
            "reserved_bytes": torch.cuda.memory_reserved(device) - before[1],
        }

    def release(self) -> None:
        """Drop the graphs and their memory: passes run eagerly until `capture`."""
        self._graphs, self._samplers = {}, {}

    def size_for(self, slices: Slices[SequenceSlice]) -> GraphSize | None:
        """The size of the graph for a pass; None if it has to run eagerly."""
        sequences = [part.sequence for part in slices]
        if any(each.adapter is not None or each.replayed_routing is not None for each in sequences):
            return None
        if is_decode_pass(slices):
            return self.decode_size(len(slices))
        if not needs_last_logits(slices):
            return None
        return self._smallest(GraphSize(sum(part.length for part in slices), len(slices)), has_prompts=True)

    def decode_size(self, requests: int) -> GraphSize | None:
        """As `size_for`, for a pass that computes one token of each of so many requests, which were in the last one."""
        return self._smallest(GraphSize(requests, requests))

    def _smallest(self, least: GraphSize, *, has_prompts: bool = False) -> GraphSize | None:
        """Of the captured sizes that a pass fits."""
        fitting = (
            size
            for size in self._sizes
            if size.tokens >= least.tokens and size.requests >= least.requests and size.has_prompts == has_prompts
        )
        return next((size for size in fitting if size in self._graphs), None)

    @torch.inference_mode()
    def begin(
        self,
        slices: Slices[SequenceSlice],
        size: GraphSize,
        rules: SamplingRules,
        sampled: SampledTokens | None = None,
    ) -> CapturedPass:
        """Begin a pass on the graph of this size, as from `size_for`.

        Without prompts, the tokens of the slices can be those that the last pass has ``sampled``.
        """
        if more := self._inputs.write(self._arrays.host_arrays(), slices, size, rules, sampled):
            self._update_tables(more)
        self._arrays.send()
        self._graphs[size].replay()
        count = len(rules.keys)
        sampling = self._samplers[min(most for most in self._samplers if most >= count)] if count else None
        edits = GpuEdits(rules, self._logits.shape[1]) if rules.changes_logits else None
        there = {} if edits is None else on_device(edits.arrays, self._model.device)
        return CapturedPass(self._logits[:count], self._tokens[:count], sampling, edits, there, self._copies)

    def _update_tables(self, entries: dict[str, NDArray[Any]]) -> None:
        """Write entries of the block tables by a copy of their own."""
        try:
            there = on_device(entries, self._model.device)
            self._flat_tables.index_copy_(0, there["places"], there["blocks"])
        except BaseException:
            self._context.block_tables.mark_all_changed()
            raise

    def _forward(self, size: GraphSize) -> None:
        """From the inputs to the logits: what is captured."""
        from megatron_runtime.gpu.rows import sampled_or_known

        there, (tokens, requests) = self._arrays.there, size
        self._flat_tables.index_copy_(0, there["new_places"], there["new_blocks"])
        starts, logit_rows = self._starts, None
        if size.has_prompts:
            starts, logit_rows = there["query_starts"], there["logit_rows"][:requests]
            inputs = there["tokens"][:tokens]
        else:
            inputs = sampled_or_known(there["tokens"][:tokens], there["sources"][:tokens], self._tokens)
        batch = ForwardBatch(
            tokens=inputs,
            **{name: there[name][:tokens] for name in ("positions", "slots")},
            context_lengths=there["context_lengths"][:requests],
            query_starts=starts[: requests + 1],
            block_tables=self._tables.index_select(0, there["table_rows"][:requests]),
            logit_rows=logit_rows,
            adapters=None,
            host_tables=None,
        )
        logits = self._model(batch, self._context.kv_cache)
        self._logits[:requests].copy_(logits)

    def _sample(self, requests: int) -> None:
        """From the logits to the tokens: what is captured."""
        from megatron_runtime.gpu import sampling
        from megatron_runtime.gpu.truncation import Truncations

        there = {name: values[:requests] for name, values in self._arrays.there.items()}
        truncations = Truncations(**{name: there[name] for name in TRUNCATION_FIELDS.values()})
        rows = sampling.SampledRows(there["temperature"], there["low"], there["high"], truncations)
        self._tokens[:requests].copy_(sampling.sample(self._logits[:requests], rows))
