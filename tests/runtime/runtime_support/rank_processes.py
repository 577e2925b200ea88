"""The ranks of a replica group as processes, forked from one that has imported what they use."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import traceback
from collections.abc import Callable
from functools import cache
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest

from megatron_runtime.launch.tasks import compute_environment

PATIENCE = 300.0
"""Seconds in which a rank must end. It may compile kernels that the cache lacks: beside a busy core, 100 for each."""
_ENVIRONMENT = compute_environment() | {"NUMBA_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
"""The environment of the launcher's ranks. Unused threads would spin beside those of the others."""
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    [
        "torch",
        "megatron_runtime.apis",
        "megatron_runtime.guides",
        "megatron_runtime.model.checkpoint",
        "megatron_runtime.model.formats.quantization.quantization_config",
        "megatron_runtime.model.kernels.cpu_attention",
        "megatron_runtime.model.kernels.row_kernels",
        "runtime_support.group_scenarios",
        "runtime_support.model_scenarios",
        "runtime_support.world_scenarios",
        "runtime_support.loaded_compiler",
        "runtime_support.frozen_objects",
    ]
)


def run_ranks(function: Callable[..., Any], ranks: int, *args: Any) -> list[Any]:
    """The result of ``function(rank, *args)`` in a process per rank; None of a process that was killed.

    An exception fails the test. The function must be importable.
    """
    _start_server()
    ends, processes = {}, []
    for rank in range(ranks):
        ours, theirs = _context.Pipe()
        process = _context.Process(target=_run, args=(theirs, function, rank, args), daemon=True)
        process.start()
        theirs.close()
        ends[ours] = rank
        processes.append(process)
    results: list[Any] = [None] * ranks
    problems = []
    waiting: list[Any] = list(ends)
    while waiting:
        ready = wait(waiting, PATIENCE)
        if not ready:
            problems.append(f"ranks {[ends[end] for end in waiting]} did not end")
            break
        for end in ready:
            assert isinstance(end, Connection)
            waiting.remove(end)
            try:
                results[ends[end]], problem = pickle.loads(end.recv_bytes())
            except EOFError:
                continue
            problems += [f"rank {ends[end]}: {problem}"] if problem else []
    for process in processes:
        if problems:
            process.kill()
        process.join()
    assert not problems, "\n".join(problems)
    return results


@cache
def _start_server() -> None:
    """Starts the process that the ranks are forked from, and whose environment they get."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in _ENVIRONMENT.items():
            patch.setenv(name, value)
        # Before Python 3.12 the server does not get this process's sys.path, and ignores modules that it does not find.
        patch.setenv("PYTHONPATH", str(Path(__file__).parent.parent), prepend=os.pathsep)
        forkserver.ensure_running()


def _run(end: Connection, function: Callable[..., Any], rank: int, args: tuple[Any, ...]) -> None:
    import torch

    # torch resolves the names of addresses; without an answer, the default of 5 seconds would slow down a test.
    os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"
    torch.set_num_threads(1)
    try:
        outcome = function(rank, *args), None
    except BaseException:
        outcome = None, traceback.format_exc()
    end.send_bytes(pickle.dumps(outcome))  # by value: the tensors must outlive this process
