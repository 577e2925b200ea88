"""A new default image reaches running resources a few at a time, or with their next edit."""

from __future__ import annotations

import asyncio

import pytest
from planning_support.resources import resource_object
from planning_support.simulation import SimulatedCluster

from megatron_operator.events import Event
from megatron_operator.kubernetes.fleet_rollout import FleetRollout, Key
from megatron_operator.metrics import Meters
from megatron_operator.reconcile import ReconcileResult, reconcile
from megatron_operator.runtime_image import ImageState
from megatron_operator.settings import Settings
from megatron_operator.status import as_json

OLD, NEW = Settings("registry/runtime:1"), Settings("registry/runtime:2")


class Model:
    """One resource, with rounds of an operator with a given default image."""

    def __init__(self, **spec: object) -> None:
        self.cluster = SimulatedCluster()
        self.obj = resource_object(**{"replicas": 2, "rollout": {"maxUnavailable": 1}, **spec})
        self.events: list[Event] = []

    async def round(self, settings: Settings, *, may_upgrade: bool = False) -> ReconcileResult:
        result = await reconcile(self.obj, self.cluster, settings=settings, may_upgrade=may_upgrade)
        self.obj["status"] = as_json(result.status)
        self.events += result.events
        self.cluster.start_all()
        self.cluster.now += 5
        return result

    async def rounds(self, settings: Settings, *, may_upgrade: bool = False) -> ReconcileResult:
        for _ in range(30):
            result = await self.round(settings, may_upgrade=may_upgrade)
        return result

    def images(self) -> list[str | None]:
        return [pod.default_image for _, pod in sorted(self.cluster.pods.items())]


async def test_a_running_resource_keeps_the_image_of_an_earlier_operator_until_its_turn() -> None:
    model = Model()
    await model.rounds(OLD)
    pods = dict(model.cluster.pods)
    result = await model.rounds(NEW)
    assert (result.image_state, result.is_settled) == (ImageState.WAITING, True)
    assert model.cluster.pods == pods
    assert result.status.image == OLD.image
    result = await model.round(NEW, may_upgrade=True)
    assert (result.image_state, result.is_settled) == (ImageState.UPGRADING, False)
    result = await model.rounds(NEW, may_upgrade=True)
    assert (result.image_state, result.is_settled) == (ImageState.CURRENT, True)
    assert model.images() == [NEW.image, NEW.image]
    changes = [event.message for event in model.events if event.reason == "ImageChanged"]
    assert changes == ["the image of the runtime changes from registry/runtime:1 to registry/runtime:2"]


async def test_replaced_pods_and_added_groups_use_the_kept_image() -> None:
    model = Model()
    await model.rounds(OLD)
    model.cluster.fail("chat-0-0-0")
    model.obj["spec"]["replicas"] = 3
    await model.rounds(NEW)
    assert model.images() == [OLD.image] * 3
    assert sorted(model.cluster.pods) == ["chat-0-1-0", "chat-1-0-0", "chat-2-0-0"]


@pytest.mark.parametrize("edit", [{"restart": {"id": "now"}}, {"engine": {"maxRequests": 8}}])
async def test_an_edit_of_the_template_also_applies_the_new_image(edit: dict[str, object]) -> None:
    model = Model()
    await model.rounds(OLD)
    model.obj["spec"] |= edit
    await model.rounds(NEW)
    assert model.images() == [NEW.image, NEW.image]


async def test_a_stopped_resource_starts_with_the_new_image() -> None:
    model = Model()
    await model.rounds(OLD)
    model.obj["spec"]["lifecycle"] = "Stopped"
    await model.rounds(OLD)
    model.obj["spec"]["lifecycle"] = "Running"
    await model.rounds(NEW)
    assert model.images() == [NEW.image, NEW.image]


async def test_an_upgrade_continues_under_the_next_operator_and_reverts_under_the_previous_one() -> None:
    model = Model()
    await model.rounds(OLD)
    for _ in range(4):
        await model.round(NEW, may_upgrade=True)
    assert set(model.images()) == {OLD.image, NEW.image}
    assert (await model.round(NEW)).image_state is ImageState.UPGRADING
    await model.rounds(OLD)
    assert set(model.images()) == {OLD.image}


async def test_an_image_of_the_spec_that_is_removed_is_not_kept() -> None:
    model = Model(image="registry/own:1")
    await model.rounds(OLD)
    assert model.images() == [None, None]
    del model.obj["spec"]["image"]
    await model.rounds(OLD)
    assert model.images() == [OLD.image, OLD.image]


async def test_a_paused_rollout_keeps_its_image_and_takes_no_turn() -> None:
    model = Model(rollout={"paused": True})
    await model.rounds(OLD)
    result = await model.rounds(NEW, may_upgrade=True)
    assert (result.image_state, model.images()) == (ImageState.PAUSED, [OLD.image, OLD.image])


# --- turns


class Fleet:
    """The turns of resources with given states."""

    def __init__(self, max_concurrent: int = 1) -> None:
        self.woken: list[Key] = []
        self.meters = Meters()
        self.turns = FleetRollout(max_concurrent, self.meters, self.woken.append)

    def waiting(self, *names: str) -> None:
        for name in names:
            self.turns.observed(("models", name), ImageState.WAITING, is_settled=True)

    async def begin(self) -> None:
        self.turns.start(delay=0)
        await asyncio.sleep(0.01)

    def having(self, *names: str) -> list[str]:
        return [name for name in names if self.turns.has_turn(("models", name))]

    def counted(self, state: str) -> float | None:
        labels = {"state": state}
        return self.meters.registry.get_sample_value("megatron_operator_fleet_rollout_resources", labels)


async def test_resources_get_their_turns_in_order() -> None:
    fleet = Fleet()
    fleet.waiting("c", "a", "b")
    assert fleet.woken == []
    await fleet.begin()
    assert (fleet.woken, fleet.having("a", "b", "c")) == ([("models", "a")], ["a"])
    fleet.turns.observed(("models", "a"), ImageState.UPGRADING, is_settled=False)
    fleet.waiting("b", "c")
    assert fleet.having("a", "b", "c") == ["a"]
    assert (fleet.counted("waiting"), fleet.counted("upgrading")) == (2, 1)
    fleet.turns.observed(("models", "a"), ImageState.CURRENT, is_settled=False)
    assert fleet.having("a", "b", "c") == ["a"]
    fleet.turns.observed(("models", "a"), ImageState.CURRENT, is_settled=True)
    assert fleet.having("a", "b", "c") == ["b"]


async def test_a_resource_that_was_upgrading_before_an_operator_restart_gets_the_first_turn() -> None:
    fleet = Fleet()
    fleet.waiting("a")
    fleet.turns.observed(("models", "b"), ImageState.UPGRADING, is_settled=False)
    await fleet.begin()
    assert fleet.having("a", "b") == ["b"]


async def test_an_unsettled_resource_waits_and_a_deleted_one_frees_its_turn() -> None:
    fleet = Fleet()
    await fleet.begin()
    fleet.turns.observed(("models", "a"), ImageState.WAITING, is_settled=False)
    fleet.waiting("b", "c")
    assert fleet.having("a", "b", "c") == ["b"]
    fleet.turns.forget(("models", "b"))
    assert fleet.having("a", "b", "c") == ["c"]


async def test_max_concurrent_resources_have_a_turn() -> None:
    several, none = Fleet(2), Fleet(0)
    for fleet in (several, none):
        await fleet.begin()
        fleet.waiting("a", "b", "c")
    assert (several.having("a", "b", "c"), none.having("a", "b", "c")) == (["a", "b"], [])


async def test_an_operator_that_loses_its_lease_gives_no_turns() -> None:
    fleet = Fleet()
    await fleet.begin()
    fleet.waiting("a")
    fleet.turns.stop()
    fleet.waiting("b")
    assert fleet.having("a", "b") == []
