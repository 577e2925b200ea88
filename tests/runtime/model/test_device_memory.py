"""Which errors are a lack of a device's memory, and what their message has."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from runtime_support.memory_shortages import CUDA, DEVICE_ERROR, SHORTAGES, Shortage
from torch.distributed import DistBackendError

from megatron_runtime.errors import ConfigurationError
from megatron_runtime.model.device_memory import is_device_shortage, naming_device_memory

GPU = torch.device("cuda", 3)


def ran_out(shortage: Shortage, device: torch.device = GPU) -> str:
    """The message of a block in which this error occurs."""
    with pytest.raises(ConfigurationError) as named, naming_device_memory("at work", device, remedy="rest"):
        shortage.fail()
    assert named.value.field == "device"
    return str(named.value)


@pytest.mark.parametrize("shortage", SHORTAGES.values(), ids=SHORTAGES)
def test_a_lack_of_device_memory_is_named_whichever_library_finds_it(shortage: Shortage) -> None:
    assert ran_out(shortage, torch.device("cpu")) == (
        f"--device cpu: cpu ran out of memory at work ({shortage.cause}); rest"
    )


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("out of memory"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."),
        RuntimeError("unable to mmap 4096 bytes from file <weights>: Cannot allocate memory (12)"),
        DEVICE_ERROR("CUDA error: an illegal memory access was encountered"),
        DistBackendError("NCCL error in: a.cpp:1, remote process exited or there was a network error\nncclRemoteError"),
        DistBackendError("NCCL error in: a.cpp:1\nncclUnhandledCudaError: Call to CUDA function failed."),
        RuntimeError("out of resource: shared memory, Required: 300000, Hardware limit: 232448"),
    ],
    ids=lambda error: str(error)[:30],
)
def test_other_errors_are_no_lack_of_device_memory(error: Exception) -> None:
    assert not is_device_shortage(error)
    with pytest.raises(type(error), match=re.escape(str(error))), naming_device_memory("at work", GPU):
        raise error


def test_host_memory_that_pytorch_can_not_allocate_is_no_lack_of_device_memory() -> None:
    with pytest.raises(RuntimeError, match="allocate memory") as found:
        torch.empty(2**50)
    assert not is_device_shortage(found.value)


@pytest.mark.parametrize(
    ("script", "size"),
    [
        ("[ $3 = --id=GPU-8f2a ] && echo 79872, 81920", "78 GiB of 80 GiB are used"),
        ("echo No devices were found; exit 6", "it has 79.1 GiB"),
    ],
)
def test_without_a_cuda_context_the_sizes_come_from_nvidia_smi(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, size: str
) -> None:
    """A GPU whose memory another program has: a context, which a question about its memory needs, has no room."""
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    properties = SimpleNamespace(uuid="8f2a", total_memory=int(79.1 * 2**30))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.mem_get_info", CUDA.fail)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: properties)
    expected = f"--device cuda: cuda:3 ran out of memory at work, {size} (CUDA error: out of memory); rest"
    assert ran_out(CUDA) == expected
    monkeypatch.setattr("torch.cuda.get_device_properties", CUDA.fail)
    assert ran_out(CUDA) == expected.replace(f", {size}", "")
