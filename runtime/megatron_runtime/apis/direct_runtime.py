"""Direct mode behind the library API: the engine works in the calling thread, together with those of its replica."""

from __future__ import annotations

import copy
import secrets
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgpack

from megatron_runtime.engine.dynamic_engine import DynamicInferenceEngine
from megatron_runtime.engine.worker.lock_step import refuse_request_timeout
from megatron_runtime.errors import CheckpointError, InvalidRequestError
from megatron_runtime.inference_request import DynamicInferenceRequest
from megatron_runtime.model.refit import Weights
from megatron_runtime.sampling_params import SamplingParams
from megatron_runtime.wire.bodies import Prompt

T = TypeVar("T")

MEETING_SECONDS = 1800.0
"""How much later than others a rank may come to a call: between calls the time is the caller's."""


class DirectRuntime:
    """One call at a time. With several ranks every rank of the replica makes the same calls, as in Megatron.

    Since all ranks are asked the same, their engines make the same schedules, and need no word from the first rank but
    the seeds.

    Args:
        engine: This rank's own.

    Raises:
        ConfigurationError: There are several ranks, and the engine has a ``request_timeout``.
    """

    def __init__(self, engine: DynamicInferenceEngine) -> None:
        self._engine = engine
        self._ranks = engine.controller.model.ranks
        self._lock = threading.Lock()
        if self._is_shared:
            refuse_request_timeout(engine.config)

    def generate(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> list[DynamicInferenceRequest]:
        """The merged requests, in the order of the prompts, the samples of a prompt side by side.

        Raises:
            InvalidRequestError: Ranks of the replica are asked for different things.
            LostRankError: Ranks are gone or late; they are named.
            LockStepError: Another rank makes another call.
        """
        with self._lock:
            return self._together("generate", lambda: self._generate(prompts, params))

    def update_weights(self, weights: Weights) -> int:
        """As the engine does; errors of other ranks are those of `generate`."""
        with self._lock:
            return self._together("update_weights", lambda: self._engine.update_weights(weights))

    @property
    def _is_shared(self) -> bool:
        return self._ranks.position.sizes.ranks_per_replica > 1

    def _together(self, call: str, act: Callable[[], T]) -> T:
        """What fails here alone would leave the others waiting: they are told by closed connections."""
        try:
            self._ranks.barrier(call, MEETING_SECONDS)
            return act()
        except (InvalidRequestError, CheckpointError):
            raise  # on all ranks
        except BaseException:
            self._ranks.close()
            raise

    def _generate(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> list[DynamicInferenceRequest]:
        if self._is_shared:
            params = self._agree(prompts, params)
        return [record.merge() for record in self._engine.generate(prompts, params)]

    def _agree(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> list[SamplingParams]:
        """The parameters, with the first rank's seeds where there were none."""
        mine = _question(prompts, params)
        seeds = [secrets.randbits(63) if each.seed is None else each.seed for each in params]
        first = self._ranks.position.is_first
        shared = self._ranks.share_inbox(msgpack.packb((seeds, mine)) if first else None)
        seeds, theirs = msgpack.unpackb(shared)
        mismatch = None
        if theirs != mine:
            mismatch = (
                f"{self._ranks.position} is asked for something else than rank 0 of its replica; in direct mode every "
                "rank of a replica calls generate with the same prompts and parameters"
            )
        if (heard := self._ranks.first_error(mismatch)) is not None:
            raise InvalidRequestError(heard, field="prompts")
        return [_with_seed(each, seed) for each, seed in zip(params, seeds, strict=True)]


def _question(prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> bytes:
    packed: bytes = msgpack.packb((list(prompts), [each.serialize() for each in params]))
    return packed


def _with_seed(params: SamplingParams, seed: int) -> SamplingParams:
    seeded = copy.copy(params)
    seeded.seed = seed
    return seeded
