"""Chooses the engine for a request: round robin, by load, or by cached prompt prefixes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from megatron_runtime.config import DEFAULT_MAX_REQUESTS, PrefixCachingCoordinatorPolicy
from megatron_runtime.data_parallel_inference_coordinator.engines import EngineEntry

Policy = PrefixCachingCoordinatorPolicy
PREFIX_TABLE_SIZE = 1 << 17


class PrefixTable:
    """Which engines were assigned which block hashes, and when; the least recently used hash is evicted first."""

    def __init__(self, size: int = PREFIX_TABLE_SIZE) -> None:
        self._size = size
        self._owners: OrderedDict[int, dict[bytes, int]] = OrderedDict()
        self._clock = 0

    def __len__(self) -> int:
        return len(self._owners)

    def record(self, identity: bytes, hashes: Sequence[int]) -> None:
        """Record that a prompt with these block hashes was assigned to this engine."""
        self._clock += 1
        owners = self._owners
        previous: dict[bytes, int] | None = None
        current = {identity: self._clock}
        for block_hash in hashes:
            known = owners.get(block_hash)
            # Adjacent blocks were mostly assigned together and share one dict, which is therefore never modified.
            if known is not previous:
                previous = known
                current = {**(known or {}), identity: self._clock}
            owners[block_hash] = current
            if known is not None:
                owners.move_to_end(block_hash)
        while len(self._owners) > self._size:
            self._owners.popitem(last=False)

    def holders(self, hashes: Sequence[int], candidates: Sequence[EngineEntry]) -> tuple[int, dict[bytes, int]]:
        """The length of the longest known prefix, and the candidates that have it, each with the time of its
        assignment (a counter).

        The hashes are chained: an engine that has one has all before it, so the last known hash decides.
        """
        for index in range(len(hashes) - 1, -1, -1):
            owners = self._owners.get(hashes[index])
            if owners is None:
                continue
            holders = {entry.identity: owners[entry.identity] for entry in candidates if entry.identity in owners}
            if holders:
                return index + 1, holders
        return 0, {}

    def forget(self, identity: bytes) -> None:
        """Remove a lost engine."""
        for block_hash, owners in list(self._owners.items()):
            if identity in owners:
                rest = {owner: time for owner, time in owners.items() if owner != identity}
                if rest:
                    self._owners[block_hash] = rest
                else:
                    del self._owners[block_hash]


class Router:
    """One routing policy and its state.

    Args:
        policy: ROUND_ROBIN and LOAD_BALANCED ignore prompts. The others take the least loaded engine, in turn among
            equals, for a prompt whose prefix is cached nowhere.
        alpha: Weight, 0 to 1, of the cached fraction of a prompt against the engine's free capacity, so that a popular
            prefix does not overload one engine.
        max_requests: Number of requests with which an engine has no free capacity.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        alpha: float = 0.5,
        max_requests: int = DEFAULT_MAX_REQUESTS,
    ) -> None:
        self.policy = policy
        self._alpha = alpha
        self._max_requests = max_requests
        self._prefixes = PrefixTable()
        self._turn = 0

    def next_in_turn(self, candidates: Sequence[EngineEntry], *, least_loaded: bool = False) -> EngineEntry | None:
        """The next candidate in round-robin order, or the next one of those with the fewest requests."""
        count = len(candidates)
        if not count:
            return None
        first = chosen = self._turn % count
        if least_loaded:
            fewest = len(candidates[first].owned)
            for position in range(first + 1, first + count):
                load = len(candidates[position % count].owned)
                if load < fewest:
                    chosen, fewest = position % count, load
        self._turn = (chosen + 1) % count
        return candidates[chosen]

    def pick(self, candidates: Sequence[EngineEntry], hashes: Sequence[int]) -> EngineEntry | None:
        """The engine for a request with these block hashes, or None if there is no candidate."""
        if self.policy is Policy.LOAD_BALANCED:
            return min(candidates, key=lambda entry: len(entry.owned), default=None)
        relevant = self.relevant(hashes)
        depth, holders = self._prefixes.holders(relevant, candidates) if relevant else (0, {})
        if not holders:
            return self.next_in_turn(candidates, least_loaded=self.policy is not Policy.ROUND_ROBIN)

        def score(entry: EngineEntry) -> tuple[float, int]:
            match = depth / len(relevant) if entry.identity in holders else 0.0
            free = max(0, self._max_requests - len(entry.owned)) / self._max_requests
            return self._alpha * match + (1 - self._alpha) * free, holders.get(entry.identity, 0)

        return max(candidates, key=score)

    def record(self, identity: bytes, hashes: Sequence[int]) -> None:
        """Record that a request with these block hashes was assigned to the engine."""
        if hashes:
            self._prefixes.record(identity, self.relevant(hashes))

    def forget(self, identity: bytes) -> None:
        """Remove a lost engine."""
        self._prefixes.forget(identity)

    def relevant(self, hashes: Sequence[int]) -> Sequence[int]:
        """The hashes that this policy considers."""
        if self.policy is Policy.LONGEST_PREFIX:
            return hashes
        return hashes[:1] if self.policy is Policy.FIRST_PREFIX_BLOCK else ()
