"""Direct mode of the library API: the engine runs in the calling thread, together with those of its replica group."""

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

CALL_TIMEOUT = 1800.0
"""Maximum difference in seconds between the ranks' calls, since callers may do other work between calls."""


class DirectRuntime:
    """One call at a time. With several ranks, every rank of the replica group makes the same calls, as in Megatron.

    With equal prompts and parameters all engines compute the same schedules; only the seeds come from the first rank.

    Args:
        engine: The engine of this rank.

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
            InvalidRequestError: The ranks of the replica group have different arguments.
            LostRankError: Ranks are lost or late; the error names them.
            LockStepError: Another rank makes another call.
        """
        with self._lock:
            return self._together("generate", lambda: self._generate(prompts, params))

    def update_weights(self, weights: Weights) -> int:
        """As for the engine; errors of other ranks are those of `generate`."""
        with self._lock:
            return self._together("update_weights", lambda: self._engine.update_weights(weights))

    @property
    def _is_shared(self) -> bool:
        return self._ranks.position.sizes.ranks_per_replica_group > 1

    def _together(self, call: str, act: Callable[[], T]) -> T:
        """Run a call on all ranks. A failure of this rank alone closes the connections, so that the others fail too."""
        try:
            self._ranks.barrier(call, CALL_TIMEOUT)
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
        own = _packed_call(prompts, params)
        seeds = [secrets.randbits(63) if each.seed is None else each.seed for each in params]
        first = self._ranks.position.is_first
        shared = self._ranks.share_inbox(msgpack.packb((seeds, own)) if first else None)
        seeds, first_call = msgpack.unpackb(shared)
        mismatch = None
        if first_call != own:
            mismatch = (
                f"{self._ranks.position} has other arguments than rank 0 of its replica group; in direct mode every "
                "rank of a replica group calls generate with the same prompts and parameters"
            )
        if (error := self._ranks.first_error(mismatch)) is not None:
            raise InvalidRequestError(error, field="prompts")
        return [_with_seed(each, seed) for each, seed in zip(params, seeds, strict=True)]


def _packed_call(prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> bytes:
    packed: bytes = msgpack.packb((list(prompts), [each.serialize() for each in params]))
    return packed


def _with_seed(params: SamplingParams, seed: int) -> SamplingParams:
    seeded = copy.copy(params)
    seeded.seed = seed
    return seeded
