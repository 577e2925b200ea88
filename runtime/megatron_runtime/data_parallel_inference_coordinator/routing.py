"""Picks the engine for a request: in turn, by load, or by who has seen the beginning of the prompt before."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from megatron_runtime.config import DEFAULT_MAX_REQUESTS, PrefixCachingCoordinatorPolicy
from megatron_runtime.data_parallel_inference_coordinator.engines import EngineEntry

Policy = PrefixCachingCoordinatorPolicy
PREFIX_TABLE_SIZE = 1 << 17


class PrefixTable:
    """Which engine was last given which block hash, and when; the hash unused for longest makes room for a new one."""

    def __init__(self, size: int = PREFIX_TABLE_SIZE) -> None:
        self._size = size
        self._owners: OrderedDict[int, dict[bytes, int]] = OrderedDict()
        self._clock = 0

    def __len__(self) -> int:
        return len(self._owners)

    def record(self, identity: bytes, hashes: Sequence[int]) -> None:
        """This engine was just given a prompt with these block hashes."""
        self._clock += 1
        owners = self._owners
        before: dict[bytes, int] | None = None
        now = {identity: self._clock}
        for block_hash in hashes:
            known = owners.get(block_hash)
            # Neighbours were mostly given out together, and share one dict, which therefore never changes.
            if known is not before:
                before = known
                now = {**(known or {}), identity: self._clock}
            owners[block_hash] = now
            if known is not None:
                owners.move_to_end(block_hash)
        while len(self._owners) > self._size:
            self._owners.popitem(last=False)

    def holders(self, hashes: Sequence[int], candidates: Sequence[EngineEntry]) -> tuple[int, dict[bytes, int]]:
        """How many leading hashes are known at most, and which candidates were given those, with a number that is
        higher the later it was.

        The hashes are chained, so an engine that has one has all before it: the last known one decides.
        """
        for index in range(len(hashes) - 1, -1, -1):
            owners = self._owners.get(hashes[index])
            if owners is None:
                continue
            knowing = {entry.identity: owners[entry.identity] for entry in candidates if entry.identity in owners}
            if knowing:
                return index + 1, knowing
        return 0, {}

    def forget(self, identity: bytes) -> None:
        """This engine is gone, and its cache with it."""
        for block_hash, owners in list(self._owners.items()):
            if identity in owners:
                rest = {owner: time for owner, time in owners.items() if owner != identity}
                if rest:
                    self._owners[block_hash] = rest
                else:
                    del self._owners[block_hash]


class Router:
    """One policy with its memory.

    Args:
        policy: ROUND_ROBIN and LOAD_BALANCED ignore prompts. The other two take the least loaded engine, in turn among
            equals, for a prompt whose prefix no engine knows.
        alpha: Weight, 0 to 1, of the part of a prompt that an engine knows; the rest is that of the engine's free
            places, so that a popular prefix does not pile up at one engine.
        max_requests: Requests with which an engine has no free places.
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

    def next_in_turn(self, candidates: Sequence[EngineEntry]) -> EngineEntry | None:
        """Round robin over the engines as they are now."""
        if not candidates:
            return None
        chosen = candidates[self._turn % len(candidates)]
        self._turn = (self._turn + 1) % len(candidates)
        return chosen

    def pick(self, candidates: Sequence[EngineEntry], hashes: Sequence[int]) -> EngineEntry | None:
        """The engine for a request with these block hashes, or None if there is no candidate."""
        if self.policy is Policy.LOAD_BALANCED:
            return min(candidates, key=lambda entry: len(entry.owned), default=None)
        relevant = self.relevant(hashes)
        depth, holders = self._prefixes.holders(relevant, candidates)
        if not holders:
            return self.next_in_turn(candidates if self.policy is Policy.ROUND_ROBIN else _least_loaded(candidates))

        def score(entry: EngineEntry) -> tuple[float, int]:
            match = depth / len(relevant) if entry.identity in holders else 0.0
            free = max(0, self._max_requests - len(entry.owned)) / self._max_requests
            return self._alpha * match + (1 - self._alpha) * free, holders.get(entry.identity, 0)

        return max(candidates, key=score)

    def record(self, identity: bytes, hashes: Sequence[int]) -> None:
        """The engine was handed a request with these block hashes."""
        if hashes:
            self._prefixes.record(identity, self.relevant(hashes))

    def forget(self, identity: bytes) -> None:
        """The engine is gone."""
        self._prefixes.forget(identity)

    def relevant(self, hashes: Sequence[int]) -> Sequence[int]:
        """The hashes that this policy looks at."""
        if self.policy is Policy.LONGEST_PREFIX:
            return hashes
        return hashes[:1] if self.policy is Policy.FIRST_PREFIX_BLOCK else ()


def _least_loaded(candidates: Sequence[EngineEntry]) -> Sequence[EngineEntry]:
    fewest = min((len(entry.owned) for entry in candidates), default=0)
    return [entry for entry in candidates if len(entry.owned) == fewest]
