"""A GPU that runs out of memory while a rank starts, on the pretended device: the rank names sizes and remedy."""

from __future__ import annotations

import gc
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock

import pytest
from gpu_support.pretended import PretendedDevice
from gpu_support.small_engine import on_gpu, one_layer
from runtime_support.memory_shortages import ALLOCATOR, CUBLAS, CUDA, NCCL, TRITON, Shortage
from runtime_support.serve_command import launch_options
from runtime_support.small_facts import PLENTY, SMALL_FACTS
from runtime_support.tiny_checkpoint import write_tiny_checkpoint

from megatron_runtime import rank
from megatron_runtime.launch.preflight import plan_engine
from megatron_runtime.launch.tasks import rank_plan, rank_task
from megatron_runtime.launch.termination import Outcome
from megatron_runtime.processes.parent_link import EXIT_BAD_INPUT
from megatron_runtime.processes.supervisor import ChildEnd

GENERAL = "use a smaller --dtype, a lower --kv-cache-memory or --max-requests, more ranks with --tensor-parallel or "
"""The beginning of the remedies of most stages."""
USED = "60 GiB of 80 GiB are used"
RAN_OUT = "--device cuda: cuda:0 ran out of memory"
CACHE = ("--kv-cache-memory", "1Mi")


class Stage(NamedTuple):
    """A stage of a start: what fails, how, and what the message has."""

    place: str
    shortage: Shortage
    when: str
    remedy: str = GENERAL
    flags: tuple[str, ...] = CACHE

    @property
    def message(self) -> str:
        """How the message begins."""
        return f"{RAN_OUT} {self.when}, {USED} ({self.shortage.cause}); {self.remedy}"


PACKAGE = "megatron_runtime"
ENGINE = f"{PACKAGE}.engine"
STAGES = {
    "context": Stage("torch.cuda.set_device", CUDA, "when it was initialized", "end the programs that use this GPU"),
    "group": Stage(f"{PACKAGE}.rank._join_replica_group", NCCL, "while it joined the other ranks"),
    "weights": Stage(f"{PACKAGE}.model.checkpoint.load_model", CUBLAS, "while it loaded the weights"),
    "places": Stage(
        f"{PACKAGE}.model.weight_places.WeightPlaces._move",
        ALLOCATOR,
        "while it moved the weights to addresses that a suspension keeps",
        f"leave out --offload-weights, or {GENERAL}",
    ),
    "largest pass": Stage(f"{ENGINE}.largest_pass._bytes_of_pass", TRITON, "in a pass of the largest size", flags=()),
    "buffers": Stage(
        f"{PACKAGE}.gpu.arriving_tokens.TokenCopies.__init__",
        CUDA,
        "for the buffers of CUDA graphs",
        f"use --num-cuda-graphs 0, or {GENERAL}",
    ),
    "graphs": Stage(
        f"{PACKAGE}.gpu.graphs.GraphRecorder.record",
        CUDA,
        "while it captured CUDA graphs",
        f"use --num-cuda-graphs 0, or {GENERAL}",
    ),
    "another part of the engine": Stage(
        f"{ENGINE}.engine_memory.make_batch_invariant", CUBLAS, "while it prepared the engine"
    ),
}
KV_CACHE = f"{PACKAGE}.model.kv_cache.KVCache._zeros"

pytestmark = pytest.mark.usefixtures("device_guard", "short_splits")


class Link:
    """Stands for ParentLink: has the options of a rank, and keeps what it reports."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.error: dict[str, Any] | None = None

    def receive_options(self) -> None:
        """They are there already."""

    def report(self, **fields: Any) -> None:
        """Keep an error."""
        self.error = fields.get("error", self.error)


@pytest.fixture
def start(
    tmp_path: Path, device: PretendedDevice, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., ChildEnd]]:
    """``start(*flags)``: run a rank with these flags on the GPU, and return how it ends."""
    del device
    checkpoint = write_tiny_checkpoint(tmp_path / "tiny", layers=1)
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.set_num_threads", lambda _: None)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda _: (20 * 2**30, 80 * 2**30))
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: None)
    monkeypatch.setattr("megatron_runtime.model.checkpoint.load_model", lambda *_, **__: on_gpu(one_layer()))
    monkeypatch.setattr(rank, "preload", lambda: None)

    def run(*flags: str) -> ChildEnd:
        more = ["--device", "cuda", "--max-requests", "2", "--batch-invariant", "--offload-weights"]
        launched = launch_options("--model", str(checkpoint), *more, *flags)
        plan = plan_engine(launched, SMALL_FACTS, PLENTY)
        later = rank_plan(SMALL_FACTS, plan, address="tcp://127.0.0.1:1").serialize() | {"checkpoint": str(checkpoint)}
        link = Link(json.loads(json.dumps({**rank_task(launched, rank=0, key=None).options, **later})))
        monkeypatch.setattr(rank.ParentLink, "from_arguments", lambda: link)
        with pytest.raises(SystemExit) as ended:
            rank.main()
        assert isinstance(ended.value.code, int)
        return ChildEnd("rank 0", ended.value.code, error=link.error)

    yield run
    gc.collect()  # What an error refers to returns its memory to the pretended device.


def refusal(end: ChildEnd) -> tuple[str, str]:
    """The field and the message of a rank that is not restarted, and ends its pod as InvalidSpec."""
    assert end.exit_code == EXIT_BAD_INPUT
    outcome = Outcome.child_failed(end, rank=0)
    assert (outcome.exit_code, outcome.reason) == (EXIT_BAD_INPUT, "InvalidSpec")
    assert end.error is not None
    return end.error["field"], outcome.message


@pytest.mark.parametrize("stage", STAGES.values(), ids=STAGES)
def test_a_rank_that_finds_too_little_memory_ends_as_bad_input_with_sizes_and_remedy(
    start: Callable[..., ChildEnd], monkeypatch: pytest.MonkeyPatch, stage: Stage
) -> None:
    monkeypatch.setattr(stage.place, stage.shortage.fail)
    field, message = refusal(start(*stage.flags))
    assert (field, message[: len(stage.message)]) == ("device", stage.message)


def test_a_kv_cache_that_does_not_fit_is_bad_input_with_its_size_and_the_remedy(
    start: Callable[..., ChildEnd], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KV_CACHE, CUDA.fail)
    field, message = refusal(start(*CACHE))
    assert field == "kv_cache_memory_bytes"
    assert re.search(
        r"(?s)^the KV cache of \d{6,7} bytes can't be allocated on cuda:0 \(CUDA error: out of memory\n.*\); "
        "lower kv_cache_memory_bytes, max_requests or max_sequence_length$",
        message,
    )


@pytest.mark.parametrize("stage", STAGES.values(), ids=STAGES)
def test_another_error_of_a_stage_is_no_bad_input(
    start: Callable[..., ChildEnd], monkeypatch: pytest.MonkeyPatch, stage: Stage
) -> None:
    """Its rank is restarted."""
    error = RuntimeError("CUDA error: an illegal memory access was encountered")
    monkeypatch.setattr(stage.place, Mock(side_effect=error))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        start(*stage.flags)
