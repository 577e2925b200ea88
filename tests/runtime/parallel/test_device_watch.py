"""A host that waits for its device notices that another rank is lost, in real processes."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from runtime_support import device_scenarios
from runtime_support.rank_processes import run_ranks
from suite_support.worker import free_port

from megatron_runtime.parallel.layout import ParallelSizes

BOUND = 20.0
"""Seconds: far below the time limit of the ranks, which is 30."""


@pytest.mark.parametrize(
    ("sizes", "victim"),
    [
        (ParallelSizes(tensor=2), 0),
        (ParallelSizes(tensor=2), 1),
        (ParallelSizes(tensor=4), 2),
        (ParallelSizes(tensor=2, pipeline=2), 1),
    ],
    ids=str,
)
def test_a_killed_rank_ends_the_waits_of_all_others_with_its_name(sizes: ParallelSizes, victim: int) -> None:
    """Also of ranks that have no connection to it."""
    found = run_ranks(device_scenarios.lose, sizes.ranks_per_replica_group, sizes, free_port(), victim, True)
    assert found.pop(victim) is None
    for noticed in found:
        assert noticed["missing"] == [victim], noticed
        assert f"{sizes.position_in_replica_group(victim).name} is missing" in noticed["message"]
        assert noticed["seconds"] < BOUND


def test_a_rank_that_is_late_ends_the_waits_of_others() -> None:
    found = run_ranks(device_scenarios.lose, 2, ParallelSizes(tensor=2), free_port(), 1, False)
    assert found[0]["missing"] == []
    assert "all ranks answer, so one is late; rank 1 is computing (timed out after " in found[0]["message"]


def test_the_owner_of_the_process_learns_of_a_lost_rank_if_the_abort_does_not_end() -> None:
    found = run_ranks(device_scenarios.lose_while_stuck, 2, ParallelSizes(tensor=2), free_port())
    assert found[0]["missing"] == [1]


def test_the_host_goes_on_if_the_work_of_the_device_never_ends() -> None:
    """Nothing more is begun on that device."""
    found = run_ranks(device_scenarios.lose_while_endless, 2, ParallelSizes(tensor=2), free_port())
    assert found[0] == {"missing": [[1]] * 3, "worked": False}


def test_an_error_of_the_device_that_a_lost_rank_causes_has_its_name() -> None:
    found = run_ranks(device_scenarios.fail_for_lost_memory, 2, ParallelSizes(tensor=2), free_port())
    assert found[0] == {"missing": [1], "cause": "AcceleratorError"}


_BEFORE_2_8 = """
import socket
from unittest.mock import Mock
import torch
if hasattr(torch, "AcceleratorError"):
    del torch.AcceleratorError
from megatron_runtime.parallel import device_watch
device_watch._GRACE = 0.1
watch = device_watch.DeviceWatch(socket.socketpair(), Mock(), lambda: None, 10.0)
for error in (ValueError("wrong"), RuntimeError("CUDA error: out of memory")):
    try:
        watch.supervise(Mock(side_effect=error))
    except Exception as found:
        assert found is error, repr(found)
        print(found)
watch.close()
"""


def test_an_error_of_the_work_is_itself_also_with_a_pytorch_that_has_no_type_for_those_of_devices() -> None:
    command = [sys.executable, "-c", _BEFORE_2_8]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.splitlines() == ["wrong", "CUDA error: out of memory"], done.stderr


def test_a_process_that_would_wait_for_its_device_without_an_end_ends(tmp_path: Path) -> None:
    found = run_ranks(device_scenarios.wait_without_an_end, 2, ParallelSizes(tensor=2), free_port(), tmp_path)
    assert found == [None, None]
    assert [each.name for each in tmp_path.iterdir()] == ["waits"]


_EXIT = """
import ctypes
from megatron_runtime.parallel import exit_limit
exit_limit.EXIT_SECONDS = 0.5
LIMIT
libc = ctypes.CDLL(None)
at_exit = ctypes.cast(libc.sleep, ctypes.c_void_p)
libc.__cxa_atexit(at_exit, ctypes.c_void_p(PAUSE), None)  # after the interpreter has ended
raise SystemExit(7)
"""


@pytest.mark.parametrize(
    ("limit", "seconds", "code"),
    [("exit_limit.limit_exit()", 60, -signal.SIGALRM), ("exit_limit.limit_exit()", 0, 7), ("", 1, 7)],
)
def test_an_exit_that_waits_for_a_device_has_a_limit(limit: str, seconds: int, code: int) -> None:
    """Only after a rank is lost; otherwise the exit takes its time."""
    program = _EXIT.replace("LIMIT", limit).replace("PAUSE", str(seconds))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stderr) == (code, "")


def test_a_rank_that_leaves_in_order_is_not_reported() -> None:
    assert run_ranks(device_scenarios.leave_in_order, 2, ParallelSizes(tensor=2), free_port()) == [2.0, 2.0]


def test_an_error_of_the_work_itself_is_that_of_the_work() -> None:
    assert run_ranks(device_scenarios.fail_at_work, 2, ParallelSizes(tensor=2), free_port()) == ["wrong", "wrong"]
