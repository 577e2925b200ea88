"""Weight updates through the coordinator: all engines load them, also later ones, or are named with the reason."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from messaging_support.fake_engine import FakeEngine, expected_tokens
from messaging_support.fleet import Fleet, until
from runtime_support.tiny_checkpoint import write_tiny_checkpoint
from safetensors.torch import save_file

from megatron_runtime.apis import MegatronLLM
from megatron_runtime.engine.worker.engine_loop import EngineLoop
from megatron_runtime.errors import CheckpointError, InvalidStateError, TransitionTimeoutError
from megatron_runtime.headers import EngineState
from megatron_runtime.inference_client import InferenceClient
from megatron_runtime.model.checkpoint import load_model, load_tokenizer
from megatron_runtime.sampling_params import SamplingParams

PARAMS = SamplingParams(num_tokens_to_generate=5, seed=5)


async def versions(client: InferenceClient) -> list[int]:
    """In the order of the replica groups, since engines register in any order."""
    views = (await client.service_state()).engines
    return [view.weight_version for view in sorted(views, key=lambda view: view.replica_group)]


async def paused(fleet: Fleet, *engines: FakeEngine) -> tuple[InferenceClient, list[EngineLoop]]:
    """A client, and the loops of these engines, each with its own replica group."""
    loops = [fleet.add_engine(engine, group=group) for group, engine in enumerate(engines)]
    client = await fleet.connect()
    await fleet.ready(client, len(loops))
    await client.pause_engines()
    return client, loops


@pytest.mark.parametrize("suspends", [False, True])
async def test_every_engine_gets_the_weights_while_paused_or_suspended(fleet: Fleet, suspends: bool) -> None:
    engines = [FakeEngine(), FakeEngine()]
    client, _ = await paused(fleet, *engines)
    if suspends:
        await client.suspend_engines()
    assert await client.update_weights("/models/2") == 1
    assert await client.update_weights("/models/3") == 2
    assert [engine.weights for engine in engines] == [["/models/2", "/models/3"]] * 2
    assert await versions(client) == [2, 2]


async def test_running_engines_refuse_a_weight_update(fleet: Fleet) -> None:
    engine = FakeEngine()
    loop = fleet.add_engine(engine)
    client = await fleet.connect()
    await fleet.ready(client, 1)
    with pytest.raises(
        InvalidStateError, match="update_weights is not possible while the service is RUNNING"
    ) as caught:
        await client.update_weights("/models/2")
    assert caught.value.allowed == ("pause",)
    with pytest.raises(InvalidStateError, match="while the engine is RUNNING; pause it first"):
        await loop.update_weights("/models/2")
    assert engine.weights == []


async def test_engines_that_can_not_load_weights_are_named_and_keep_their_weights(fleet: Fleet) -> None:
    client, _ = await paused(fleet, FakeEngine(), FakeEngine(refuses="/models/2"))
    with pytest.raises(CheckpointError, match=r"^replica group 1 \(attempt 0\): /models/2: not a checkpoint$"):
        await client.update_weights("/models/2")
    assert await versions(client) == [1, 0]
    assert await client.update_weights("/models/3") == 2
    assert await versions(client) == [2, 2]
    await client.unpause_engines()
    assert (await client.add_request("go on", PARAMS)).succeeded()


async def test_an_update_that_times_out_names_the_missing_engines(fleet: Fleet) -> None:
    client, loops = await paused(fleet, FakeEngine(), FakeEngine())
    loops[1]._connection._on_message = lambda _: None
    with pytest.raises(TransitionTimeoutError, match=r"update_weights was not done .* replica group 1 \(attempt 0\)$"):
        await client.update_weights("/models/2", timeout=0.3)


async def test_a_lost_engine_does_not_block_an_update(fleet: Fleet) -> None:
    client, loops = await paused(fleet, FakeEngine(), FakeEngine())
    loops[1]._connection._on_message = lambda _: None
    updating = client.update_weights("/models/2")
    await until(lambda: loops[0]._engine.stats().weight_version == 1, "the update of the other")
    loops[1]._connection.close()
    assert await updating == 1


async def test_an_engine_that_registers_later_loads_the_weights_before_any_request(fleet: Fleet) -> None:
    client, _ = await paused(fleet, FakeEngine())
    await client.update_weights("/models/2")
    await client.unpause_engines()
    late = FakeEngine()
    loop = fleet.add_engine(late, group=1)
    await fleet.ready(client, 2)
    assert late.weights == ["/models/2"]
    assert loop.state is EngineState.RUNNING
    results = await asyncio.gather(*(client.add_request(str(number), PARAMS) for number in range(4)))
    assert [result.generated_tokens for result in results] == [expected_tokens(str(i), PARAMS) for i in range(4)]
    assert late.added


async def test_an_engine_that_registers_later_and_can_not_load_the_weights_is_refused(fleet: Fleet) -> None:
    client, _ = await paused(fleet, FakeEngine())
    await client.update_weights("/models/2")
    late = fleet.add_engine(FakeEngine(refuses="/models/2"), group=1)
    await until(lambda: late.ended, "the end of the late engine")
    assert "can't load the weights of the other engines: /models/2: not a checkpoint" in str(late.failure)
    assert await versions(client) == [1]


async def test_weights_that_no_engine_could_load_are_not_sent_to_later_engines(fleet: Fleet) -> None:
    client, _ = await paused(fleet, FakeEngine(refuses="nowhere"))
    with pytest.raises(CheckpointError):
        await client.update_weights("nowhere")
    late = FakeEngine()
    fleet.add_engine(late, group=1)
    await fleet.ready(client, 2)
    assert late.weights == []


async def join_after_a_replacement(fleet: Fleet, client: InferenceClient) -> FakeEngine:
    """An engine that registers with a paused service of one other engine, after its coordinator was replaced."""
    await asyncio.to_thread(fleet.stop_coordinator)
    fleet.start_coordinator(initial_state="PAUSED")
    await fleet.ready(client, 1)
    late = FakeEngine()
    fleet.add_engine(late, group=1)
    await fleet.ready(client, 2)
    return late


async def test_a_replacement_coordinator_gets_the_weights_of_the_service_from_engines(fleet: Fleet) -> None:
    fleet.add_engine(group=0)
    client = await fleet.connect()
    await fleet.ready(client, 1)
    await client.pause_engines()
    await client.update_weights("/models/2")
    late = await join_after_a_replacement(fleet, client)
    assert late.weights == ["/models/2"]
    assert await versions(client) == [1, 1]
    assert await client.update_weights("/models/3") == 2
    assert await versions(client) == [2, 2]


async def test_a_replacement_coordinator_sends_its_initial_weights_to_the_first_engine(
    fleet: Fleet,
) -> None:
    await asyncio.to_thread(fleet.stop_coordinator)
    coordinator = fleet.start_coordinator(initial_weights=(4, "/models/5"))
    engine = FakeEngine()
    fleet.add_engine(engine)
    client = await fleet.connect()
    result = await client.add_request("hello", PARAMS)
    assert result.succeeded()
    assert engine.weights == ["/models/5"]
    assert await versions(client) == [4]
    reported: list[Any] = []
    coordinator.on_weights = reported.append
    await client.pause_engines()
    assert await client.update_weights("/models/6") == 5
    assert reported == [(5, "/models/6")]


async def test_weights_that_no_engine_could_load_are_reverted_for_the_supervisor_too(fleet: Fleet) -> None:
    fleet.add_engine(FakeEngine(refuses="nowhere"))
    client = await fleet.connect()
    await fleet.ready(client, 1)
    await client.pause_engines()
    await client.update_weights("/models/2")
    reported: list[Any] = []
    assert fleet.coordinator is not None
    fleet.coordinator.on_weights = reported.append
    with pytest.raises(CheckpointError):
        await client.update_weights("nowhere")
    assert reported == [(2, "nowhere"), (1, "/models/2")]


async def test_a_ready_engine_with_older_weights_is_updated(fleet: Fleet) -> None:
    updated = FakeEngine()
    loop = fleet.add_engine(updated, group=0)
    client = await fleet.connect()
    await fleet.ready(client, 1)
    await client.pause_engines()
    await client.update_weights("/models/2")
    await client.unpause_engines()
    # At the next coordinator a restarted engine registers before the one that has the weights.
    connected = loop._connection._register
    reconnected = asyncio.Event()
    loop._connection._dealer._on_connected = reconnected.set
    await asyncio.to_thread(fleet.stop_coordinator)
    fleet.start_coordinator()
    behind = FakeEngine()
    fleet.add_engine(behind, group=1)
    await fleet.ready(client, 1)
    assert behind.weights == []
    await reconnected.wait()  # A message to a coordinator that is gone would be lost.
    connected()
    await fleet.ready(client, 2)
    await until(lambda: behind.weights == ["/models/2"], "the update of the other")
    state = await fleet.ready(client, 2)
    assert (state.state, [view.state for view in state.engines]) == ("RUNNING", ["RUNNING"] * 2)
    assert await versions(client) == [1, 1]


async def test_tensors_loaded_without_the_coordinator_are_not_sent_to_other_engines(fleet: Fleet) -> None:
    loop = fleet.add_engine(group=0)
    client = await fleet.connect()
    await fleet.ready(client, 1)
    await client.pause_engines()
    await client.update_weights("/models/2")
    assert await loop.update_weights({"a tensor": 1}) == 2  # type: ignore[dict-item]
    late = await join_after_a_replacement(fleet, client)
    assert late.weights == []
    assert await client.update_weights("/models/2") == 3
    assert await versions(client) == [3, 3]


async def test_named_tensors_reach_engines_in_other_processes_by_a_file(fleet: Fleet, tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path / "tiny")
    for group in range(2):
        fleet.spawn_engine(group=group, checkpoint=checkpoint)
    model = load_model(checkpoint, dtype="float32")
    named = {name: -view if "down_proj" in name else view.clone() for name, view in model.destinations().items()}
    save_file(named, tmp_path / "step.safetensors")
    client = await fleet.connect()
    await fleet.ready(client, 2)
    prompts = [[1, 2, 3], [4, 5, 6]]
    params = SamplingParams(temperature=0, num_tokens_to_generate=20, ignore_eos=True)

    async def ask_all() -> list[Any]:
        return [result[-1] for result in await asyncio.gather(*(client.add_request(it, params) for it in prompts))]

    before = await ask_all()
    await client.pause_engines()
    assert await client.update_weights(tmp_path / "step.safetensors") == 1
    await client.unpause_engines()
    after = await ask_all()
    direct = MegatronLLM(model=model, tokenizer=load_tokenizer(checkpoint))
    direct.update_weights(named)
    expected = [request.generated_tokens for request in direct.generate(prompts, params)]
    assert [request.generated_tokens for request in after] == expected
    assert expected != [request.generated_tokens for request in before]
    assert [request.weight_version for request in [*before, *after]] == [0, 0, 1, 1]
