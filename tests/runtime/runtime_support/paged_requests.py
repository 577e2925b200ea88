"""A paged cache with requests, without an engine."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from megatron_runtime.model.decoder import Decoder
from megatron_runtime.model.forward_batch import AdapterRows, ForwardBatch
from megatron_runtime.model.kv_cache import KVCache

NUM_STATES = 8
"""Most requests of a model with recurrent layers."""


class PagedRequests:
    """Requests by name, whose blocks are in random order in the pool."""

    def __init__(self, decoder: Decoder, *, num_blocks: int = 512, block_size_tokens: int = 16, seed: int = 0) -> None:
        self.decoder = decoder
        self.cache = KVCache(
            decoder.shard.cache_config, num_blocks, block_size_tokens, decoder.dtype, num_states=NUM_STATES
        )
        self._free = random.Random(seed).sample(range(num_blocks), num_blocks)
        self._tables: dict[str, list[int]] = {}
        self._lengths: dict[str, int] = {}
        self.adapters: dict[str, int] = {}
        """The slots of the requests with an adapter."""

    def forward(self, new_tokens: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
        """One pass over the new tokens of each request; the logits of all of them, [new tokens, vocab]."""
        logits = self.logits(new_tokens)
        assert logits is not None
        return dict(zip(new_tokens, logits.split([len(tokens) for tokens in new_tokens.values()]), strict=True))

    def logits(self, new_tokens: Mapping[str, Sequence[int]]) -> Tensor | None:
        """The same for a single request; None on a rank that doesn't sample."""
        logits: Tensor | None = self.decoder(self._batch(new_tokens), self.cache)
        return logits

    def continue_greedily(self, prompts: Mapping[str, Sequence[int]], num_tokens: int) -> dict[str, list[int]]:
        """Prefill all prompts in one pass, then decode them together."""
        made: dict[str, list[int]] = {name: [] for name in prompts}
        new = {name: list(tokens) for name, tokens in prompts.items()}
        for _ in range(num_tokens):
            new = self._choose(new)
            for name, tokens in new.items():
                made[name] += tokens
        return made

    def _choose(self, new: Mapping[str, Sequence[int]]) -> dict[str, list[int]]:
        """The most likely next token of each request, broadcast by the rank that samples."""
        logits, chosen = self.logits(new), None
        if logits is not None:
            ends = torch.tensor([len(tokens) for tokens in new.values()]).cumsum(0) - 1
            chosen = logits[ends].argmax(-1).numpy().tobytes()
        tokens = np.frombuffer(self.decoder.ranks.share_outcome(chosen, checksum=0).wait(), dtype=np.int64)
        return {name: [token] for name, token in zip(new, tokens.tolist(), strict=True)}

    def _batch(self, new_tokens: Mapping[str, Sequence[int]]) -> ForwardBatch:
        size = self.cache.block_size_tokens
        positions: list[int] = []
        slots: list[int] = []
        starts = [0]
        for name, tokens in new_tokens.items():
            table, old = self._tables.setdefault(name, []), self._lengths.get(name, 0)
            self._lengths[name] = old + len(tokens)
            while len(table) * size < self._lengths[name]:
                table.append(self._free.pop())
            mine = range(old, self._lengths[name])
            positions += mine
            slots += [table[position // size] * size + position % size for position in mine]
            starts.append(starts[-1] + len(tokens))
        tables = [self._tables[name] for name in new_tokens]
        width = max(map(len, tables))
        return ForwardBatch(
            tokens=torch.tensor([token for tokens in new_tokens.values() for token in tokens]),
            positions=torch.tensor(positions),
            slots=torch.tensor(slots),
            query_starts=torch.tensor(starts, dtype=torch.int32),
            context_lengths=torch.tensor([self._lengths[name] for name in new_tokens], dtype=torch.int32),
            block_tables=torch.tensor([table + [0] * (width - len(table)) for table in tables], dtype=torch.int32),
            logit_rows=torch.arange(starts[-1]),
            adapters=self._adapter_rows(new_tokens),
            state_slots=torch.tensor([NUM_STATES - 1 - [*self._tables].index(name) for name in new_tokens]),
        )

    def _adapter_rows(self, new_tokens: Mapping[str, Sequence[int]]) -> AdapterRows | None:
        slots = [self.adapters.get(name, -1) for name, tokens in new_tokens.items() for _ in tokens]
        return AdapterRows(np.array(slots, np.int32)) if self.adapters else None
