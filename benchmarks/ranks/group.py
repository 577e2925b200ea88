"""A replica group: this process is its first rank, the others are its children."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys

from megatron_runtime.launch.tasks import compute_environment

if missing := compute_environment():
    # The C library and OpenMP read their variables when a process starts.
    os.execve(sys.executable, sys.orig_argv, os.environ | missing)

import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from megatron_runtime.config import InferenceConfig
from megatron_runtime.engine.dynamic_engine import DynamicInferenceEngine
from megatron_runtime.engine.worker.follower_actions import run_follower
from megatron_runtime.engine.worker.lock_step import LockStepEngine
from megatron_runtime.launch.ports import free_loopback_port
from megatron_runtime.model.checkpoint import load_model, load_tokenizer
from megatron_runtime.parallel.join import join_replica_group
from megatron_runtime.parallel.layout import ParallelSizes
from megatron_runtime.sampling_params import SamplingParams
from peers.protocol import answer_requests, versions
from ranks.timed_ranks import BEGIN, END, TimedRanks

PATIENCE = 7200.0
"""Timeout of a rank in seconds: the group is stopped while other groups run."""


@dataclass(frozen=True)
class RankSetup:
    """Configuration of every rank of a group."""

    folder: str
    dtype: str
    threads: int
    tensor: int
    pipeline: int
    requests: int
    longest: int
    port: int = 0

    @property
    def sizes(self) -> ParallelSizes:
        """The parallel sizes."""
        return ParallelSizes(tensor=self.tensor, pipeline=self.pipeline)


class Group:
    """The first rank, and the measurements of the others."""

    def __init__(self, setup: RankSetup) -> None:
        self._setup = setup
        self._seconds: dict[str, float] = {}
        self._others = [_start(setup, rank) for rank in range(1, setup.sizes.ranks_per_replica_group)]
        self._engine, self._ranks = _join(setup, 0, self._note)
        self._together = LockStepEngine(self._engine, self._ranks) if self._others else None

    def run(self, prompts: list[list[int]], new_tokens: int) -> dict[str, object]:
        """Runs the job; returns its seconds, the new tokens of each prompt, and the communication time of each rank by
        call."""
        engine = self._together or self._engine
        params = SamplingParams(temperature=0, num_tokens_to_generate=new_tokens, ignore_eos=True)
        self._meet(BEGIN)
        started = time.perf_counter()
        futures = [engine.add_request(number, prompt, params) for number, prompt in enumerate(prompts)]
        while engine.has_unfinished_requests():
            engine.step_modern()
        seconds = time.perf_counter() - started
        self._meet(END)
        answers = [future.result(timeout=0).merge() for future in futures]
        return {
            "seconds": seconds,
            "tokens": [list(answer.generated_tokens) for answer in answers],
            "communication": [self._seconds, *(other.recv() for other in self._others)],
        }

    def _meet(self, name: str) -> None:
        if self._together is None:
            self._ranks.barrier(name)
        else:
            self._together.barrier(name)

    def _note(self, seconds: dict[str, float]) -> None:
        self._seconds = seconds


def _start(setup: RankSetup, rank: int) -> Connection:
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    spawn.Process(target=_run_follower, args=(setup, rank, there), daemon=True).start()
    return here


def _run_follower(setup: RankSetup, rank: int, clock: Connection) -> None:
    run_follower(*_join(setup, rank, clock.send))


def _join(setup: RankSetup, rank: int, on_end: Any) -> tuple[DynamicInferenceEngine, Any]:
    torch.set_num_threads(setup.threads)
    position = setup.sizes.position_in_replica_group(rank)
    joined = join_replica_group(position, host="127.0.0.1", port=setup.port, key="", timeout=PATIENCE)
    ranks = TimedRanks(joined, on_end)
    config = InferenceConfig(
        kv_cache_memory_bytes=1 << 29, max_requests=setup.requests, max_sequence_length=setup.longest
    )
    model = load_model(setup.folder, dtype=setup.dtype, ranks=ranks)
    return DynamicInferenceEngine.build(model, load_tokenizer(setup.folder), config), ranks


def main() -> None:
    """Answers ``load``, with the fields of RankSetup, and ``run``."""
    groups: list[Group] = []

    def load(**fields: Any) -> dict[str, object]:
        groups.append(
            Group(RankSetup(**fields | {"folder": str(Path(fields["folder"])), "port": free_loopback_port()}))
        )
        return {"versions": versions("megatron-inference", "torch")}

    answer_requests({"load": load, "run": lambda **job: groups[0].run(**job)})
    for child in multiprocessing.active_children():
        with contextlib.suppress(ProcessLookupError):
            child.kill()


if __name__ == "__main__":
    main()
