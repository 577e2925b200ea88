"""Tensor parallel ranks, each with a GPU of this machine: their sums, tokens and steps, and a rank that is killed."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import time
from collections.abc import Iterator
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
from gpu_support.small_engine import generate, random_decoder, small_engine

from gpu_checks import rank_sums
from gpu_checks.engine_speed import GREEDY, SAMPLED, abort_requests, load_of, make_engine, timed_steps
from gpu_checks.random_models import random_model
from gpu_checks.results import Check, Result, Sizes, free_memory
from megatron_runtime.errors import LostRankError
from megatron_runtime.model.decoder import Decoder
from megatron_runtime.model.refit import update_weights
from megatron_runtime.parallel.layout import ParallelSizes
from megatron_runtime.parallel.ranks import Ranks
from megatron_runtime.sampling_params import SamplingParams
from servers.server import free_port

COUNTS = (2, 4, 8)
"""Ranks, as far as this machine has GPUs."""
TIME_LIMIT = 240.0
"""Seconds that the ranks of one count may take."""
LOSS_LIMIT = 15.0
"""Seconds until the others know of a killed rank; far below the 60 seconds that a rank may be late."""
_LENGTHS = (6, 4, 5)
_SAMPLERS: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0.0}, "all samplers": SAMPLED | {"min_p": 0.05}}
_context = multiprocessing.get_context("spawn")


def checks(sizes: Sizes) -> Iterator[Check]:
    """One, which is skipped in words with a single GPU."""
    yield "several GPUs", partial(check, sizes)


def check(sizes: Sizes) -> Iterator[Result]:
    """For each number of ranks. Without a GPU they are ranks on the CPU."""
    available = torch.cuda.device_count() if sizes.has_gpu else COUNTS[0]
    counts = [count for count in COUNTS if count <= available]
    if not counts:
        yield Result("several GPUs", f"not run: this machine has {available} GPU")
    free_memory(has_gpu=sizes.has_gpu)
    for count in counts:
        yield from _check(sizes, count)


def _check(sizes: Sizes, count: int) -> Iterator[Result]:
    found, killed_at = _run(sizes, count)
    name = f"{count} GPUs" if sizes.has_gpu else f"{count} ranks"
    device = "cuda" if sizes.has_gpu else "cpu"
    yield from rank_sums.rows_of(name, [said["sums"] for said in found])
    for kind, params in _SAMPLERS.items():
        expected = _tokens(_model(), device, params)
        wrong = [rank for rank, said in enumerate(found) if said["tokens"][kind] != expected]
        words = f"other tokens on the ranks {wrong}" if wrong else "equal on all ranks"
        yield Result(f"{name}: engine's tokens, {kind}", words, "those of one rank", is_wrong=bool(wrong))
    for batch in found[0]["seconds"]:
        step = max(said["seconds"][batch] for said in found)
        yield Result(f"{name}: engine step, batch {batch}", f"{step * 1e3:.4g} ms, {batch / step:.4g} tokens/s")
    took = max(said["lost"]["time"] for said in found[:-1]) - killed_at
    missing = [said["lost"]["missing"] for said in found[:-1]]
    is_wrong = missing != [[count - 1]] * (count - 1) or took > LOSS_LIMIT
    words = f"the others name the ranks {missing} after {took:.3g} s"
    yield Result(f"{name}: a killed rank", words, f"rank {count - 1}, {LOSS_LIMIT:g} s", is_wrong=is_wrong)


def _run(sizes: Sizes, count: int) -> tuple[list[dict[str, Any]], float]:
    """What each rank has found before the last one is killed, with what the others find then; and the time of the kill.

    Raises:
        RuntimeError: A rank fails, or says nothing in time.
    """
    ports = {kind: free_port() for kind in rank_sums.KINDS}
    pairs = [_context.Pipe() for _ in range(count)]
    ranks = [
        _context.Process(target=_rank, args=(theirs, rank, count, ports, sizes), daemon=True)
        for rank, (_, theirs) in enumerate(pairs)
    ]
    for rank in ranks:
        rank.start()
    try:
        deadline = time.monotonic() + TIME_LIMIT
        said = [_received(ours, deadline) for ours, _ in pairs]
        killed_at = time.time()
        os.kill(ranks[-1].pid or 0, signal.SIGKILL)
        for (ours, _), each in zip(pairs[:-1], said[:-1], strict=True):
            each["lost"] = _received(ours, deadline)
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
    return said, killed_at


def _received(end: Connection, deadline: float) -> dict[str, Any]:
    if not end.poll(max(deadline - time.monotonic(), 0)):
        raise RuntimeError(f"a rank has said nothing after {TIME_LIMIT:g} s")
    try:
        found: dict[str, Any] = pickle.loads(end.recv_bytes())
    except EOFError:
        raise RuntimeError("a rank has failed; its error is above") from None
    return found


def _rank(end: Connection, number: int, count: int, ports: dict[str, int], sizes: Sizes) -> None:
    """A process: one rank."""
    torch.set_num_threads(1)
    device = "cuda" if sizes.has_gpu else "cpu"
    if sizes.has_gpu:
        torch.cuda.set_device(number)
    position = ParallelSizes(tensor=count).position_in_replica_group(number)
    sums = {}
    for kind, port in reversed(ports.items()):
        ranks = rank_sums.join(position, port, device, kind)
        sums[kind] = rank_sums.find_sums(sizes, ranks, device)
        if kind != "chosen":
            ranks.close()
    part = Decoder(_model().config, dtype=torch.float32, ranks=ranks)
    update_weights(part, _model().destinations())
    tokens = {kind: _tokens(part, device, params) for kind, params in _SAMPLERS.items()}
    end.send_bytes(pickle.dumps({"sums": sums, "tokens": tokens, "seconds": _step_seconds(sizes, ranks, device)}))
    try:
        _go_on(sizes, ranks, device)
    except LostRankError as error:
        end.send_bytes(pickle.dumps({"missing": list(error.missing), "time": time.time()}))
    os._exit(0)  # Nothing that torch waits for at the end of a process.


def _model() -> Decoder:
    """Whose heads each number of ranks divides."""
    return random_decoder(hidden_size=64, num_attention_heads=8, num_kv_heads=8, num_layers=1)


def _tokens(model: Decoder, device: str, params: dict[str, Any]) -> list[list[int]]:
    """Of an engine with this model, or a part of one, on the device; on a GPU by CUDA graphs."""
    there = Decoder(model.config, dtype=model.dtype, device=device, ranks=model.ranks)
    there.copy_from(model)
    return generate(small_engine(there, num_cuda_graphs=-1), params, None, _LENGTHS)


def _step_seconds(sizes: Sizes, ranks: Ranks, device: str) -> dict[int, float]:
    """By batch, with random weights of the measured model."""
    model, load = random_model(sizes, device=device, ranks=ranks), load_of(sizes)
    engine = make_engine(model, sizes, load)
    found = {}
    for batch in load.batches:
        found[batch] = timed_steps(engine, sizes, load, batch, GREEDY, captured=sizes.has_gpu)
        abort_requests(engine, batch)
    engine.reset()
    return found


def _go_on(sizes: Sizes, ranks: Ranks, device: str) -> None:
    """One request after the other, until a rank is lost."""
    engine = small_engine(random_model(sizes, device=device, ranks=ranks), num_cuda_graphs=-1)
    params = SamplingParams(temperature=0.0, ignore_eos=True, num_tokens_to_generate=100)
    while True:
        engine.generate([[1, 2, 3]], params)
