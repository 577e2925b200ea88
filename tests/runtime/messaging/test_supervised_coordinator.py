"""The coordinator's process: start, restart, and end with its parent."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from messaging_support.fake_engine import FakeEngine
from messaging_support.fleet import until
from runtime_support.processes import is_alive
from suite_support.worker import free_port

from megatron_runtime.data_parallel_inference_coordinator.options import CoordinatorOptions
from megatron_runtime.data_parallel_inference_coordinator.supervised_coordinator import SupervisedCoordinator
from megatron_runtime.engine.worker.engine_loop import EngineLoop
from megatron_runtime.errors import ConfigurationError, CoordinatorError
from megatron_runtime.inference_client import InferenceClient
from megatron_runtime.lifecycle import CoordinatorState
from megatron_runtime.processes.supervisor import ChildEnd, RestartBudget
from megatron_runtime.sampling_params import SamplingParams

KEY = "k" * 32

PARENT = """
import asyncio, sys
from megatron_runtime.data_parallel_inference_coordinator.options import CoordinatorOptions
from megatron_runtime.data_parallel_inference_coordinator.supervised_coordinator import SupervisedCoordinator
from megatron_runtime.lifecycle import CoordinatorState

async def main():
    options = CoordinatorOptions(data_parallel_size=1, schedule_output_path=sys.argv[1])
    coordinator = SupervisedCoordinator(
        options, key=None, current_state=lambda: CoordinatorState.RUNNING, may_use_other_port=True
    )
    coordinator.start()
    print(await coordinator.wait_serving(30), coordinator.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def kept(port: int | None, state: str = "RUNNING", **options: Any) -> SupervisedCoordinator:
    """A coordinator that is not started yet."""
    arguments = CoordinatorOptions(data_parallel_size=1, inference_coordinator_port=port)
    return SupervisedCoordinator(arguments, key=KEY, current_state=lambda: CoordinatorState[state], **options)


async def test_a_killed_coordinator_is_replaced_at_the_same_port_in_the_state_of_the_service() -> None:
    coordinator = kept(None, "PAUSED", may_use_other_port=True)
    coordinator.start()
    address = await coordinator.wait_serving(30)
    client = InferenceClient(address, key=KEY)
    await client.start()
    first, epoch = coordinator.pid, client.coordinator_epoch
    assert first is not None
    os.kill(first, signal.SIGKILL)
    await until(lambda: client.coordinator_epoch != epoch, "the contact with the next one")
    assert (await client.service_state()).state == "PAUSED"
    assert coordinator.restarts == 1
    assert coordinator.pid != first
    client.stop()
    await coordinator.stop(5)
    assert coordinator.pid is not None
    assert not is_alive(coordinator.pid)


async def test_a_restarted_process_gets_the_weights_of_the_service() -> None:
    coordinator = kept(None, "PAUSED", may_use_other_port=True)
    coordinator.start()
    address = await coordinator.wait_serving(30)
    client = InferenceClient(address, key=KEY)
    await client.start()
    first = asyncio.create_task(EngineLoop(FakeEngine(), coordinator_address=address, key=KEY).run())
    state = await client.service_state()
    while not any(view.ready for view in state.engines):
        state = await client.wait_for_state_change(state.revision, 5.0)
    assert await client.update_weights("/models/2") == 1
    first.cancel()
    epoch = client.coordinator_epoch
    assert coordinator.pid is not None
    os.kill(coordinator.pid, signal.SIGKILL)
    await until(lambda: client.coordinator_epoch not in (epoch, None), "the contact with the next one")
    late = FakeEngine()
    second = asyncio.create_task(EngineLoop(late, coordinator_address=address, key=KEY).run())
    await until(lambda: late.weights == ["/models/2"], "the update")
    client.stop()
    for task in (first, second):
        task.cancel()
    await asyncio.gather(first, second, return_exceptions=True)
    await coordinator.stop(5)


async def test_a_coordinator_that_ends_normally_is_not_restarted_if_so_configured() -> None:
    ends: list[ChildEnd] = []
    coordinator = kept(free_port(), restart_success=False, on_end=ends.append)
    coordinator.start()
    client = InferenceClient(await coordinator.wait_serving(30), key=KEY)
    await client.start()
    client.shutdown_coordinator()
    await until(lambda: ends, "the end")
    assert (ends[0].exit_code, coordinator.restarts) == (0, 0)
    client.stop()


async def test_a_host_of_another_machine_fails_at_once() -> None:
    coordinator = SupervisedCoordinator(
        CoordinatorOptions(data_parallel_size=1, host="203.0.113.7"),
        key=KEY,
        current_state=lambda: CoordinatorState.RUNNING,
        may_use_other_port=True,
    )
    coordinator.start()
    with pytest.raises(ConfigurationError, match=r"can't listen on '203\.0\.113\.7'"):
        await coordinator.wait_serving(30)


async def test_a_coordinator_with_a_fixed_port_does_not_start_while_the_port_is_in_use() -> None:
    owner = kept(free_port())
    owner.start()
    port = int((await owner.wait_serving(30)).rpartition(":")[2])
    second = kept(port, budget=RestartBudget(0))
    second.start()
    with pytest.raises(CoordinatorError, match=f"port {port} is in use"):
        await second.wait_serving(30)
    await owner.close()


async def test_it_ends_with_its_parent_and_writes_the_routing_trace(tmp_path: Path) -> None:
    schedule = tmp_path / "schedule.json"
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    parent = await asyncio.create_subprocess_exec(
        *(sys.executable, str(script), str(schedule)), stdout=asyncio.subprocess.PIPE
    )
    try:
        assert parent.stdout is not None
        address, pid = (await parent.stdout.readline()).decode().split()
        serving = asyncio.create_task(EngineLoop(FakeEngine(), coordinator_address=address).run())
        client = InferenceClient(address)
        await client.start()
        assert (await client.add_request("hello", SamplingParams(num_tokens_to_generate=3))).succeeded()
    finally:
        parent.kill()
        await parent.wait()
    await until(lambda: not is_alive(int(pid)), "the coordinator's end")
    assert json.loads(schedule.read_text())["num_requests"] == 1
    client.stop()
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
