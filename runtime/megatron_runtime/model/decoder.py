"""One decoder for all model families, configured by the checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from megatron_runtime.errors import CheckpointError
from megatron_runtime.model.attention import plan_attention
from megatron_runtime.model.attention_kind import attention_kind
from megatron_runtime.model.config import ModelConfig
from megatron_runtime.model.decoder_layer import DecoderLayer, NumberedLayer, SingleMixerLayer, make_layer
from megatron_runtime.model.embedding import Embedding
from megatron_runtime.model.formats.origin import Origin
from megatron_runtime.model.formats.quantized_weights import KeptKind
from megatron_runtime.model.formats.tensor_names import tensor_names
from megatron_runtime.model.forward_batch import ForwardBatch
from megatron_runtime.model.head import Head
from megatron_runtime.model.hidden_pool import HiddenPool
from megatron_runtime.model.kernel_warm_up import use_kernels
from megatron_runtime.model.kernels import cpu_attention, row_kernels
from megatron_runtime.model.kernels.gpu_attention import cache_dtype
from megatron_runtime.model.kv_cache import KVCache
from megatron_runtime.model.lora.adapter_slots import AdapterSlots
from megatron_runtime.model.norms import NO_NORM
from megatron_runtime.model.packed_linear import can_pack, pack_linears, prepare_products
from megatron_runtime.model.placements import Placement, layer_placements, norm_placements, whole
from megatron_runtime.model.positions import Positions
from megatron_runtime.model.recorded_layers import RecordedLayers
from megatron_runtime.model.recurrence import RecurrentPlan, prepare_recurrence
from megatron_runtime.model.routing_tape import RoutingTape
from megatron_runtime.model.shard import Shard
from megatron_runtime.parallel.ranks import Ranks
from megatron_runtime.parallel.single_rank import SingleRank

if TYPE_CHECKING:
    from megatron_runtime.gpu.flashinfer_attention import FlashInfer
    from megatron_runtime.model.weight_places import WeightPlaces


class Decoder(nn.Module):
    """From token ids to logits of the next token, over a paged cache; or the part of the decoder that one of ``ranks``
    has.

    The weights are uninitialized; `load_model` fills them through `placements`.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        ranks: Ranks | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.dtype = dtype
        self.ranks: Ranks = SingleRank() if ranks is None else ranks
        self.shard = Shard(config, self.ranks.position)
        """The part of the model on this rank."""
        self.embedding: Embedding | None = None
        self.head: Head | None = None
        with torch.device(device):
            if self.ranks.position.is_first_stage:
                self.embedding = Embedding(self.shard, dtype, self.ranks)
            self.layers = nn.ModuleList(make_layer(self.shard, n, dtype, self.ranks) for n in self.shard.layers)
            if self.ranks.position.computes_logits:
                tied = self.embedding if config.tie_word_embeddings else None
                self.head = Head(self.shard, dtype, self.ranks, None if tied is None else tied.table)
        self._numbered_layers = self._number_layers()
        self.recorded_layers: RecordedLayers | None = None
        """The layers for passes of few rows; None: they are called in every pass, such as where ranks share them."""
        if isinstance(self.ranks, SingleRank):
            self.recorded_layers = RecordedLayers(self._numbered_layers)
        self.is_packed = False
        """Whether `prepare` has packed the weights for the matrix kernels."""
        self.is_shared = False
        """Whether the weights are those of a live model, which owns their memory."""
        self.kept_kind = KeptKind.NONE
        """Which matrices that a checkpoint stores quantized stay so, as far as their types allow it."""
        self.origin: Origin | None = None
        """The files of the weights; None for weights that were created in memory."""
        self.positions = Positions(config, dtype, device)
        self.flashinfer: FlashInfer | None = None
        """Attends instead of the kernels of this project, if it is chosen."""
        self.places: WeightPlaces | None = None
        """Where the weights are on their GPU, and return to after a suspension; None if they may move."""
        self.adapters: AdapterSlots | None = None
        """The adapters of this decoder; `use_adapters` creates them."""

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return next(self.parameters()).device

    @torch.inference_mode()
    def forward(
        self,
        batch: ForwardBatch,
        kv_cache: KVCache,
        tape: RoutingTape | None = None,
        pool: HiddenPool | None = None,
    ) -> Tensor | None:
        """Logits of the requested rows, float32 [L, vocab]. Writes keys and values of the new tokens to the cache.

        A pipeline stage receives the activations of the previous stage and sends its own to the next. Of a replica
        group of several ranks, those that have logits return them, the others return None. ``tape`` is for the
        experts of this stage's layers; ``pool`` gets hidden states after the last norm, on the last stage.
        """
        plan = plan_attention(batch, kv_cache, self.flashinfer)
        recurrence = None if self.config.recurrent is None else RecurrentPlan(batch)
        positions = self.positions(batch.positions)
        if self.adapters is not None:
            self.adapters.begin(batch.adapters)
        hidden = self._begin(batch)
        normed: Tensor | None = None
        if self.recorded_layers is not None and batch.adapters is None and pool is None:
            normed = self.recorded_layers.run(hidden, positions, plan, kv_cache)
        if normed is None:
            normed = self._numbered_layers[0].layer.input_norm(hidden)
            for index, (number, layer, next_norm) in enumerate(self._numbered_layers):
                used = plan if self.config.recurrence_of(number) is None else recurrence
                cache = kv_cache.layer(index)
                hidden, normed = layer(hidden, normed, positions[number], used, cache, next_norm, tape)
        if self.head is None:
            if not self.ranks.position.is_last_stage:
                self.ranks.send(hidden)
            return None
        if pool is not None:
            pool.add(normed)
        logits: Tensor | None = self.head(normed if batch.logit_rows is None else normed[batch.logit_rows])
        return logits

    def prepare(self) -> None:
        """Prepare the computation on this device, and pack the weights for its matrix kernels. To be called after
        loading.

        Every matrix is stored only packed, except for a head that is tied to the embedding: the embedding is looked up
        by rows, so this matrix is stored twice.
        """
        self.prepare_kernels()
        if not can_pack(self.dtype, self.device):
            return
        pack_linears(self.layers)
        if self.head is not None:
            self.head.pack()
        self.is_packed = True

    def prepare_kernels(self, block_size_tokens: int | None = None, kv_cache_dtype: str = "auto") -> None:
        """Compile the kernels of this device, or load them from the cache. Needs no weights; any thread may call it.

        Those of a GPU are compiled for a KV cache of the type ``kv_cache_dtype``, as in `cache_dtype`, with blocks of
        ``block_size_tokens``; None: at their first use.
        """
        if self.device.type == "cpu":
            cpu_attention.prepare(attention_kind(self.config).cache_layout, self.dtype)
            row_kernels.prepare(self.dtype, norms_of_heads=self.config.query_key_norm == "head")
            prepare_products(self.dtype)
            if self.config.recurrent is not None:
                prepare_recurrence(self.config.recurrent)
        elif block_size_tokens is not None:
            cached = cache_dtype(kv_cache_dtype, self.config, self.dtype, self.device)
            cache = KVCache(self.shard.cache_config, 1, block_size_tokens, cached, self.device)
            vocabulary = self.config.vocab_size if self.ranks.has_logits else None
            layers = self._numbered_layers
            use_kernels(self, self.dtype, layers, self.positions, cache, vocabulary, self.flashinfer)

    def use_adapters(self, device: torch.device | None = None) -> AdapterSlots:
        """The adapters of this decoder, none at first. Later weights get them too.

        Args:
            device: The device that computes; None: that of the weights, which are not released.

        Raises:
            CheckpointError: The weights are those of a live model, whose modules have another layout.
        """
        if self.is_shared:
            raise CheckpointError(
                "adapters are not supported on a live model of Megatron Core; load its checkpoint with load_model"
            )
        if self.adapters is None:
            self.adapters = AdapterSlots(self.shard, self.dtype, device or self.device)
            self.adapters.attach(self.layers)
        return self.adapters

    def replace_with(self, other: Decoder) -> None:
        """Replace the contents by those of another decoder, which must not be used afterwards. Adapters remain."""
        kept_kind, adapters = self.kept_kind, self.adapters
        vars(self).clear()
        vars(self).update(vars(other))
        self.kept_kind, self.adapters = kept_kind, adapters
        if adapters is not None:
            adapters.attach(self.layers)

    def copy_from(self, other: Decoder) -> None:
        """Copy the other decoder's weights into the memory of this one's. Both are unpacked, with the same
        configuration.
        """
        for ours, theirs in zip(self.parameters(), other.parameters(), strict=True):
            ours.copy_(theirs)
        for buffer, other_buffer in zip(self.buffers(), other.buffers(), strict=True):
            buffer.copy_(other_buffer)
        self.origin = other.origin

    def destinations(self) -> dict[str, Tensor]:
        """The destination of each tensor of a checkpoint: Hugging Face's name to a view into this decoder's weights.

        Of a replica group of several ranks, each has its part of the tensors, or none. Rows that a checkpoint orders by
        key heads are in another order. After `prepare` the matrices are copies, to be read only.
        """
        return {name: place.view for name, place in self.placements().items()}

    def placements(self) -> dict[str, Placement]:
        """The same, with the part of the tensor that is stored there."""
        names = tensor_names(self.config.architecture)
        rows = (self.shard.vocabulary,)
        named: dict[str, Placement] = {}
        if self.embedding is not None:
            named[f"{names.embedding}.weight"] = Placement(self.embedding.weight, rows, matrix_of=self.embedding)
            if self.embedding.learned_positions is not None:
                named[f"{names.learned_positions}.weight"] = whole(self.embedding.learned_positions)
        if self.head is not None:
            named |= norm_placements(self.head.norm, names.final_norm)
            table = names.embedding if self.config.tie_word_embeddings else names.head
            if f"{table}.weight" not in named:
                named[f"{table}.weight"] = Placement(self.head.weight, rows, matrix_of=self.head)
        for number, layer, _ in self._numbered_layers:
            prefix = names.layer.format(number)
            named |= {prefix + name: place for name, place in layer_placements(layer, names, self.shard)}
        return named

    def _number_layers(self) -> list[NumberedLayer]:
        """The layers of this rank. Without a head no norm follows the last one: the next stage begins with it."""
        layers = [layer for layer in self.layers if isinstance(layer, DecoderLayer | SingleMixerLayer)]
        last_norm = NO_NORM if self.head is None else self.head.norm
        norms = [*(layer.input_norm for layer in layers[1:]), last_norm]
        return [NumberedLayer(*each) for each in zip(self.shard.layers, layers, norms, strict=True)]

    def _begin(self, batch: ForwardBatch) -> Tensor:
        if self.embedding is None:
            return self.ranks.receive((len(batch.tokens), self.config.hidden_size), self.dtype)
        hidden: Tensor = self.embedding(batch)
        return hidden
