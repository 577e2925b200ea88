"""The KV cache, and the tables that turn scheduled slices into tensors."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from collections.abc import Sequence as Slices
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_runtime.config import InferenceConfig
from megatron_runtime.engine.block_tables import BlockTables
from megatron_runtime.engine.context_limits import ContextLimits, check_drafts, config_within, keeps_addresses
from megatron_runtime.engine.flat_slices import FlatSlices
from megatron_runtime.engine.packed_arrays import on_device
from megatron_runtime.engine.routing_store import ExpertRouting
from megatron_runtime.engine.sampling.grammar import RequestGuide
from megatron_runtime.engine.sampling.penalties import has_one_draw
from megatron_runtime.engine.sampling.sampler import make_sampling_table
from megatron_runtime.engine.sampling.sampling_table import SamplingRules
from megatron_runtime.engine.sampling.thinking import ThinkingLimit
from megatron_runtime.engine.scheduling.block_allocator import BlockAllocator
from megatron_runtime.engine.scheduling.prefix_cache import PrefixCache
from megatron_runtime.engine.scheduling.sequence import Sequence, SequenceSlice, SettledPass
from megatron_runtime.engine.scheduling.state_snapshots import StateSnapshots
from megatron_runtime.engine.sequence_rows import SampledTokens
from megatron_runtime.errors import ConfigurationError
from megatron_runtime.model.config import ModelConfig
from megatron_runtime.model.decoder import Decoder
from megatron_runtime.model.forward_batch import AdapterRows, ForwardBatch, HostTables, rows_of_adapters
from megatron_runtime.model.hidden_pool import HiddenPool
from megatron_runtime.model.kernels.gpu_attention import cache_dtype
from megatron_runtime.model.kv_cache import KVCache
from megatron_runtime.model.shard import Shard
from megatron_runtime.sampling_params import SamplingParams

_TRANSFORMER_CONFIG = ("num_layers", "num_attention_heads", "kv_channels")
"""Fields of Megatron's TransformerConfig."""


@dataclass(frozen=True)
class LogProbRows:
    """The log probabilities that a step reports: P values over L rows of logits and S sampled tokens."""

    rows: Tensor
    """int64 [P], rows of the logits."""
    targets: Tensor
    """int64 [P], the tokens whose log probability is reported, where ``sampled`` is -1."""
    sampled: Tensor
    """int64 [P], the sampled token (0 .. S-1) whose log probability is reported, or -1."""
    top_n: int
    """Most tokens of a top-n list."""
    drawn: Tensor | None = None
    """int64 [D], the indices of those that are of the sampled distribution; None if all are of the model."""
    rules: SamplingRules | None = None
    """The sampling rules of these D values."""


class DynamicInferenceContext:
    """The device memory of one engine: a paged KV cache, and a row of the tables per running sequence.

    Args:
        model_config: The sizes of the model. With the TransformerConfig of a live GPTModel, which lacks some of them,
            the memory is allocated when the engine is created, with the model's own type and device.
        inference_config: The limits of memory, requests and tokens.
        dtype: Type of the weights, and of keys and values unless the configuration says otherwise.
        device: The device of the model.
        shard: This rank's part of the model; None: the whole model. All ranks have the limits of the largest part.

    Raises:
        ConfigurationError: The settings leave no room for a single block, the memory can't be allocated, or
            model_config is of another library.
    """

    def __init__(
        self,
        model_config: ModelConfig | Any,
        inference_config: InferenceConfig,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        shard: Shard | None = None,
    ) -> None:
        self.config = inference_config
        self.block_size_tokens = inference_config.block_size_tokens
        self.clock: Callable[[], float] = time.perf_counter
        """Monotonic seconds, which measure what drafts cost. The tokens of an answer do not depend on it."""
        self.is_allocated = False
        """Whether there is a KV cache, which may be released for a while."""
        self.reset_counts()
        if isinstance(model_config, ModelConfig):
            self._allocate(model_config, dtype, torch.device(device), shard or Shard(model_config))
        elif not all(hasattr(model_config, name) for name in _TRANSFORMER_CONFIG):
            raise ConfigurationError(
                f"model_config is a {type(model_config).__name__}; give the config of a model from load_model, or of a "
                "GPTModel of Megatron Core",
                field="model_config",
            )

    def allocate_for(self, model: Decoder) -> None:
        """Allocate the memory for this model, unless that was done. Raises ConfigurationError as the constructor."""
        if not self.is_allocated:
            self._allocate(model.config, model.dtype, model.device, model.shard)

    def _allocate(self, model_config: ModelConfig, dtype: torch.dtype, device: torch.device, shard: Shard) -> None:
        self.device = device
        dtype = cache_dtype(self.config.kv_cache_dtype, model_config, dtype, device)
        check_drafts(model_config, self.config)
        self.has_states = model_config.recurrent is not None
        """Whether each row is the slot of the recurrent states of a sequence."""
        largest = shard.largest_cache_config
        self.limits = ContextLimits.derive(largest, self.config, dtype=dtype, device_type=self.device.type)
        self.config = inference_config = config_within(self.limits, largest, self.config)
        prefixes = None
        if inference_config.enable_prefix_caching:
            snapshots = StateSnapshots(self.limits.num_snapshots) if self.has_states else None
            prefixes = PrefixCache(inference_config.prefix_caching_eviction_policy, self.block_size_tokens, snapshots)
        self.allocator = BlockAllocator(self.limits.num_blocks, prefixes)
        keeps = keeps_addresses(inference_config, self.device)
        self.kv_cache: KVCache = self.limits.allocate(shard.cache_config, dtype, self.device, keeps_addresses=keeps)
        draft = inference_config.speculative_draft_model
        self.draft_cache: KVCache | None = None
        """Keys and values of the draft model, for the same blocks."""
        if draft is not None:
            self.draft_cache = self.limits.allocate(
                draft.shard.cache_config, draft.dtype, self.device, keeps_addresses=keeps
            )
        self.routing = ExpertRouting(model_config, shard, inference_config, self.limits.num_blocks)
        self._free_rows = list(range(self.limits.max_requests - 1, -1, -1))
        self.block_tables = BlockTables(
            self.limits.max_requests, self.limits.max_blocks_per_sequence, self.block_size_tokens
        )
        longest = self.limits.max_sequence_length
        self._sampling = make_sampling_table(self.limits.max_requests, model_config.vocab_size, longest, self.device)
        self._prefill_ends: dict[int, int] = {}
        """By row, the number of tokens that a sequence began with, until a pass has computed the last of them."""
        self.is_allocated = True

    @property
    def caches(self) -> list[KVCache]:
        """The KV cache, and that of the draft model, if there is one."""
        return [self.kv_cache] if self.draft_cache is None else [self.kv_cache, self.draft_cache]

    def reset_counts(self) -> None:
        """Begin to count passes anew."""
        self.step_count = 0
        """Number of passes that were begun."""
        self.lifetime_prefill_token_count = 0
        """Tokens that these passes computed of prompts, and again of evicted requests; without cached prefixes."""

    def count_pass(self, slices: Slices[SequenceSlice]) -> None:
        """Count a pass over slices of running sequences."""
        self.step_count += 1
        if not self._prefill_ends:
            return
        for part in slices:
            row = _row_of(part.sequence)
            if row in self._prefill_ends:
                end = self._prefill_ends[row]
                self.lifetime_prefill_token_count += min(part.end, end) - part.start
                if part.end >= end:
                    del self._prefill_ends[row]

    @property
    def max_requests(self) -> int:
        """Most requests in one forward pass."""
        return self.limits.max_requests

    @property
    def max_tokens(self) -> int:
        """Most tokens in one forward pass."""
        return self.limits.max_tokens

    @property
    def max_sequence_length(self) -> int:
        """Most tokens of a prompt and its answer together."""
        return self.limits.max_sequence_length

    def occupy(
        self,
        sequence: Sequence,
        params: SamplingParams,
        stop_ids: Collection[int] = (),
        bad_sequences: Collection[tuple[int, ...]] = (),
        guide: RequestGuide | None = None,
        thinking: ThinkingLimit | None = None,
    ) -> None:
        """Assign a row to a sequence that starts to run. The other arguments are those of FilterRequest."""
        assert sequence.row is None, f"request {sequence.request_id} has a row already"
        sequence.row = row = self._free_rows.pop()
        self.block_tables.clear(row)
        self._prefill_ends[row] = len(sequence.tokens)
        rules = params, sequence.prompt_length, stop_ids, bad_sequences, guide, thinking
        self._sampling.write(row, *rules, counts_on_device=has_one_draw(sequence, self.config.logprobs_mode))

    def vacate(self, sequence: Sequence) -> None:
        """Free the row of a sequence that has stopped running, if it has one."""
        if sequence.row is not None:
            self._free_rows.append(sequence.row)
            self._prefill_ends.pop(sequence.row, None)
            sequence.row = None

    def load_snapshots(self, slices: Slices[SequenceSlice]) -> None:
        """Copy the recurrent states that sequences begin with, before the pass that computes their first slices."""
        for part in slices:
            if (snapshot := part.sequence.first_snapshot) is not None:
                self.kv_cache.load_snapshot(snapshot, _row_of(part.sequence))
                part.sequence.first_snapshot = None

    def apply(self, settled: SettledPass) -> None:
        """Copy the recurrent states that a pass has left, and renew the tables of changed sequences."""
        for sequence in settled.replaced:
            self.block_tables.clear(_row_of(sequence))
        for sequence, snapshot in settled.snapshots:
            self.kv_cache.store_snapshot(_row_of(sequence), snapshot)

    def forward_batch(self, slices: Slices[SequenceSlice]) -> ForwardBatch:
        """The flat batch of slices of running sequences, which own the blocks that they need."""
        flat = FlatSlices.of(slices, self.block_tables)
        tables = HostTables(
            flat.query_starts.astype(np.int32),
            flat.contexts.astype(np.int32),
            self.block_tables.padded(flat.rows, flat.contexts),
        )
        arrays: dict[str, NDArray[np.generic]] = {
            "tokens": flat.tokens,
            "positions": flat.positions,
            "slots": flat.slots,
            **tables._asdict(),
            "logit_rows": _logit_rows(slices, flat.query_starts),
        }
        if self.has_states:
            arrays["state_slots"] = flat.rows.astype(np.int64)
        slots = _adapters_of_rows(slices)
        if slots is None or self.device.type == "cpu":
            adapters = None if slots is None else AdapterRows(slots)
            return ForwardBatch(**on_device(arrays, self.device), adapters=adapters, host_tables=tables)
        rows = rows_of_adapters(slots)
        there = on_device(arrays | {f"adapter {slot}": rows[slot] for slot in rows}, self.device)
        adapters = AdapterRows(slots, {slot: there.pop(f"adapter {slot}") for slot in rows})
        return ForwardBatch(**there, adapters=adapters, host_tables=tables)

    def sampling_rules(
        self, slices: Slices[SequenceSlice], *, with_edits: bool = True, known: SamplingRules | None = None
    ) -> SamplingRules:
        """The sampling rules of the slices that sample. Without edits, the tokens of the slices need not be known.

        ``known`` are their rules without edits, if those are known.
        """
        if known is not None and not self._sampling.may_edit:
            return known
        return self._sampling.rules([(part.sequence, part.end) for part in slices if part.samples], with_edits)

    def rules_for_sampled(self, sampled: SampledTokens) -> SamplingRules | None:
        """The rules without edits of sequences that all sample after the pass; None if penalties need the tokens."""
        return self._sampling.rules_for_sampled(*sampled.sequences, sampled.sources)

    def sampled_logit_rows(self, slices: Slices[SequenceSlice]) -> Tensor | None:
        """int64 [S], the rows of the logits that are sampled; None means all rows."""
        if all(part.samples and part.num_logits == 1 for part in slices):
            return None
        ends = np.cumsum([part.num_logits for part in slices])
        rows = np.array([end - 1 for end, part in zip(ends, slices, strict=True) if part.samples], np.int64)
        return on_device({"rows": rows}, self.device)["rows"]

    def hidden_pool(self, slices: Slices[SequenceSlice]) -> HiddenPool | None:
        """The hidden states that the slices pool, or None."""
        rows: list[int] = []
        owners: list[int] = []
        end = count = 0
        for part in slices:
            end += part.length
            if pooled := part.num_pooled:
                rows += range(end - pooled, end)
                owners += [count] * pooled
                count += 1
        if not count:
            return None
        arrays = {"rows": np.array(rows, np.int64), "owners": np.array(owners, np.int64)}
        there = on_device(arrays, self.device)
        return HiddenPool(there["rows"], there["owners"], count)

    def log_prob_rows(self, slices: Slices[SequenceSlice], top_n: int) -> LogProbRows | None:
        """The log probabilities that the slices report, or None."""
        rows: list[int] = []
        targets: list[int] = []
        sampled: list[int] = []
        end = num_sampled = 0
        for part in slices:
            end += part.num_logits
            known = part.sequence.tokens[part.end - part.num_log_probs + 1 : part.end + 1]
            rows += range(end - part.num_log_probs, end)
            targets += known
            sampled += [-1] * len(known)
            if part.samples and part.num_log_probs:
                targets.append(0)
                sampled.append(num_sampled)
            num_sampled += part.samples
        if not rows:
            return None
        drawn, rules = self._drawn(slices)
        arrays = {"rows": rows, "targets": targets, "sampled": sampled} | ({"drawn": drawn} if drawn else {})
        there = on_device({name: np.array(values, np.int64) for name, values in arrays.items()}, self.device)
        return LogProbRows(**there, top_n=top_n, rules=rules)

    def _drawn(self, slices: Slices[SequenceSlice]) -> tuple[list[int], SamplingRules | None]:
        """The log probabilities that are of the sampled distribution, and their sampling rules."""
        if self.config.logprobs_mode == "raw_logprobs":
            return [], None
        drawn: list[int] = []
        draws: list[tuple[Sequence, int]] = []
        start = 0
        for part in slices:
            for place, length in enumerate(range(part.end - part.num_log_probs + 1, part.end + 1), start):
                if length >= part.sequence.prompt_length:
                    drawn.append(place)
                    draws.append((part.sequence, length))
            start += part.num_log_probs
        return drawn, self._sampling.rules(draws) if drawn else None

    def check_integrity(self, running: Slices[Sequence]) -> None:
        """Assert that exactly the running sequences have rows."""
        rows = [sequence.row for sequence in running]
        assert None not in rows, "a running sequence has no row"
        assert sorted([*self._free_rows, *(row for row in rows if row is not None)]) == list(range(self.max_requests))


def _adapters_of_rows(slices: Slices[SequenceSlice]) -> NDArray[np.int32] | None:
    """As `AdapterRows.slots`; None without any adapter."""
    if all(part.sequence.adapter is None for part in slices):
        return None
    slots = [-1 if part.sequence.adapter is None else part.sequence.adapter for part in slices]
    return np.repeat(np.array(slots, np.int32), [part.length for part in slices])


def _row_of(sequence: Sequence) -> int:
    assert sequence.row is not None, f"request {sequence.request_id} has no row"
    return sequence.row


def _logit_rows(slices: Slices[SequenceSlice], query_starts: NDArray[np.int64]) -> NDArray[np.int64]:
    """The last rows of each slice, whose logits are computed."""
    counts = np.array([part.num_logits for part in slices], np.int64)
    ends = np.cumsum(counts)
    return np.arange(int(ends[-1])) + np.repeat(query_starts[1:] - ends, counts)
