"""LoRA adapters through the coordinator: all engines have them, also later ones, or none has."""

from __future__ import annotations

import pytest
from messaging_support.fake_engine import FakeEngine
from messaging_support.fleet import Fleet, until

from megatron_runtime.engine.worker.engine_loop import EngineLoop
from megatron_runtime.errors import CheckpointError, InvalidRequestError, TransitionTimeoutError
from megatron_runtime.inference_client import InferenceClient
from megatron_runtime.wire.service_state import AdapterView


async def started(fleet: Fleet, *engines: FakeEngine) -> tuple[InferenceClient, list[EngineLoop]]:
    """A client, and the loops of these engines, each with its own replica group."""
    loops = [fleet.add_engine(engine, group=group) for group, engine in enumerate(engines)]
    client = await fleet.connect()
    await fleet.ready(client, len(loops))
    return client, loops


def names(engine: FakeEngine) -> list[str]:
    return [entry.name for entry in engine.adapters]


async def served(client: InferenceClient) -> list[str]:
    return [adapter.name for adapter in (await client.service_state()).adapters]


async def test_every_engine_gets_an_adapter_before_it_is_announced(fleet: Fleet) -> None:
    engines = [FakeEngine(), FakeEngine()]
    client, _ = await started(fleet, *engines)
    await client.load_adapter("one", "/adapters/1")
    await client.load_adapter("two", "/adapters/2")
    assert [names(engine) for engine in engines] == [["one", "two"]] * 2
    assert (await client.service_state()).adapters == (
        AdapterView("one", "/adapters/1"),
        AdapterView("two", "/adapters/2"),
    )
    await client.unload_adapter("one")
    assert [names(engine) for engine in engines] == [["two"]] * 2
    assert await served(client) == ["two"]


async def test_changes_that_are_sent_at_once_are_done_one_after_the_other(fleet: Fleet) -> None:
    engine = FakeEngine(step_seconds=0.01)
    client, _ = await started(fleet, engine)
    first, second, third = (client.load_adapter(name, f"/{name}") for name in ("a", "b", "c"))
    away = client.unload_adapter("b")
    await first, await second, await third, await away
    assert names(engine) == ["a", "c"]


async def test_an_adapter_that_one_engine_can_not_load_is_on_none(fleet: Fleet) -> None:
    good, bad = FakeEngine(), FakeEngine(refuses="/adapters/2")
    client, _ = await started(fleet, good, bad)
    await client.load_adapter("one", "/adapters/1")
    with pytest.raises(CheckpointError, match=r"^replica group 1 \(attempt 0\): /adapters/2: not an adapter$"):
        await client.load_adapter("two", "/adapters/2")
    await until(lambda: names(good) == ["one"], "the end of the adapter on the other engine")
    assert names(bad) == await served(client) == ["one"]
    await client.load_adapter("two", "/adapters/3")
    assert names(good) == names(bad) == ["one", "two"]


async def test_a_name_is_replaced_only_on_request(fleet: Fleet) -> None:
    engine = FakeEngine()
    client, _ = await started(fleet, engine)
    await client.load_adapter("one", "/adapters/1")
    with pytest.raises(InvalidRequestError, match="'one' is loaded from /adapters/1; set load_inplace"):
        await client.load_adapter("one", "/adapters/2")
    (before,) = engine.adapters
    await client.load_adapter("one", "/adapters/2", replaces=True)
    (after,) = engine.adapters
    assert (after.path, after.name) == ("/adapters/2", "one")
    assert after.generation != before.generation
    await client.load_adapter("one", "/adapters/2", replaces=True)
    assert engine.adapters[0].generation != after.generation, "its files may have changed"


async def test_names_that_are_unknown_or_of_the_engines_are_refused(fleet: Fleet) -> None:
    client, _ = await started(fleet, FakeEngine(own=[("own", "/own")]))
    with pytest.raises(InvalidRequestError, match="'one' is not loaded; loaded adapters: none"):
        await client.unload_adapter("one")
    for change in (client.load_adapter("own", "/other"), client.unload_adapter("own")):
        with pytest.raises(InvalidRequestError, match="'own' is one of --lora-modules"):
            await change
    with pytest.raises(InvalidRequestError, match="lora_name='' must be a text"):
        client.unload_adapter("")


async def test_adapters_of_the_engines_are_served_once_all_have_them(fleet: Fleet) -> None:
    client, _ = await started(fleet, FakeEngine(own=[("old", "/old"), ("both", "/both")]))
    assert await served(client) == ["both", "old"]
    fleet.add_engine(FakeEngine(own=[("new", "/new"), ("both", "/both")]), group=1)
    await fleet.ready(client, 2)
    assert await served(client) == ["both"]


async def test_an_engine_that_registers_later_loads_the_adapters_before_any_request(fleet: Fleet) -> None:
    client, _ = await started(fleet, FakeEngine())
    await client.load_adapter("one", "/adapters/1")
    late = FakeEngine()
    fleet.add_engine(late, group=1)
    await fleet.ready(client, 2)
    assert names(late) == ["one"]


async def test_an_engine_that_registers_later_and_can_not_load_an_adapter_is_refused(fleet: Fleet) -> None:
    client, _ = await started(fleet, FakeEngine())
    await client.load_adapter("one", "/adapters/1")
    late = fleet.add_engine(FakeEngine(refuses="/adapters/1"), group=1)
    await until(lambda: late.ended, "the end of the late engine")
    assert "can't load the adapters of the other engines: /adapters/1: not an adapter" in str(late.failure)
    assert await served(client) == ["one"]


async def test_a_change_that_times_out_is_undone_and_names_the_missing_engines(fleet: Fleet) -> None:
    good = FakeEngine()
    client, loops = await started(fleet, good, FakeEngine())
    loops[1]._connection._on_message = lambda _: None
    with pytest.raises(TransitionTimeoutError, match=r"change_adapters was not done .* replica group 1 \(attempt 0\)$"):
        await client.load_adapter("one", "/adapters/1", timeout=0.3)
    await until(lambda: not good.adapters, "the end of the adapter")
    assert await served(client) == []


async def test_without_engines_an_adapter_can_not_be_checked(fleet: Fleet) -> None:
    client = await fleet.connect()
    with pytest.raises(TransitionTimeoutError, match="missing: no engine"):
        await client.load_adapter("one", "/adapters/1")


async def test_a_coordinator_that_replaces_another_one_adopts_the_adapters_of_the_engines(fleet: Fleet) -> None:
    engines = [FakeEngine(), FakeEngine()]
    client, _ = await started(fleet, *engines)
    await client.load_adapter("one", "/adapters/1")
    await client.load_adapter("two", "/adapters/2")
    fleet.stop_coordinator()
    fleet.start_coordinator()
    late = FakeEngine()
    fleet.add_engine(late, group=2)
    await fleet.ready(client, 3)
    await until(lambda: names(late) == ["one", "two"], "the adapters of the late engine")
    assert await served(client) == ["one", "two"]
    await client.unload_adapter("one")
    assert [names(engine) for engine in (*engines, late)] == [["two"]] * 3
