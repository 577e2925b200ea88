"""Two operators: the holder of the Lease is active."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from cluster_support.cluster import Cluster, wait_until
from operator_support.faulty_server import FaultyServer, never_answer
from operator_support.fixtures import ACCOUNT, SYSTEM
from operator_support.operator_process import OperatorProcess
from operator_support.resource import Resource
from operator_support.scripted_node import ScriptedNode
from suite_support.console_runs import documented
from suite_support.doc_shell import DocShell

LEASE = "megatron-operator"
LEADING = "megatron_operator_leading"
ROUNDS = 'megatron_operator_reconciles_total{outcome="success"}'


@dataclass
class TwoOperators:
    """Two operators for the same resources; ``first`` was started first, ``way`` is its connection to the API
    server."""

    first: OperatorProcess
    second: OperatorProcess
    cluster: Cluster
    way: FaultyServer

    async def until_leads(self, operator: OperatorProcess, leads: bool = True) -> None:
        what = f"the operator of {operator.log} to {'act' if leads else 'stand by'}"
        await asyncio.to_thread(wait_until, lambda: operator.metric(LEADING) == leads, what)

    async def spec(self) -> dict[str, object]:
        """The spec of the Lease."""
        found = await asyncio.to_thread(self.cluster.get, "lease", LEASE, "-n", SYSTEM)
        return dict(found["spec"])


@pytest.fixture
def seconds() -> int:
    """The duration of the Lease."""
    return 3


@pytest.fixture
def operator(shared_operator: OperatorProcess) -> None:
    """The shared operator does not run in these tests, because it needs no Lease to act."""
    shared_operator.stop()


@pytest.fixture
async def operators(
    operator: None,  # noqa: ARG001
    installed: Cluster,
    tmp_path: Path,
    seconds: int,
) -> AsyncIterator[TwoOperators]:
    """They replace the shared operator."""
    settings = {"MEGATRON_OPERATOR_LEASE": f"{SYSTEM}/{LEASE}", "MEGATRON_OPERATOR_LEASE_SECONDS": str(seconds)}
    kubeconfig = installed.kubeconfig_for(ACCOUNT, SYSTEM)
    async with FaultyServer(kubeconfig) as way:
        faulty = way.write_kubeconfig(tmp_path / "first.kubeconfig")
        first = OperatorProcess(faulty, tmp_path / "first.log", settings=settings)
        second = OperatorProcess(kubeconfig, tmp_path / "second.log", settings=settings)
        operators = TwoOperators(first, second, installed, way)
        try:
            await asyncio.to_thread(first.start)
            await operators.until_leads(first)
            await asyncio.to_thread(second.start)
            yield operators
        finally:
            await asyncio.to_thread(second.stop)
            await asyncio.to_thread(first.stop)
            await asyncio.to_thread(installed.kubectl, "-n", SYSTEM, "delete", "lease", LEASE)


async def attempts(chat: Resource, count: int) -> int:
    """The number of attempts that events report, once it is at least ``count``."""
    reasons = [event["reason"] for event in await chat.events(*["AttemptStarted"] * count)]
    return reasons.count("AttemptStarted")


@pytest.mark.usefixtures("node")
async def test_one_of_two_operators_acts_and_the_other_does_nothing(
    chat: Resource, operators: TwoOperators, reader: DocShell
) -> None:
    await chat.create(replicas=2)
    await chat.until(lambda status: status.get("ready") == "2/2", "both groups")
    assert await attempts(chat, 2) == 2
    assert (operators.first.metric(LEADING), operators.second.metric(LEADING)) == (1, 0)
    assert operators.first.metric(ROUNDS) > 0
    assert operators.second.metric(ROUNDS) == 0
    spec = await operators.spec()
    assert (spec["leaseDurationSeconds"], spec.get("leaseTransitions", 0)) == (3, 0)
    assert {"holderIdentity", "acquireTime", "renewTime"} < spec.keys()
    (get,) = documented("docs/install.md", "kubectl get leases")
    printed = await asyncio.to_thread(reader.run, get.command)
    assert f"{LEASE} {spec['holderIdentity']}" in " ".join(printed.split())


async def test_another_operator_takes_over_from_one_that_was_killed(
    chat: Resource, node: ScriptedNode, operators: TwoOperators
) -> None:
    await chat.create()
    await chat.until_phase("Running")
    await asyncio.to_thread(operators.first.kill)
    await chat.kubectl("scale", "mi", "chat", "--replicas=2")
    await chat.until(lambda status: status["ready"] == "2/2", "both groups")
    assert operators.second.metric(LEADING) == 1
    assert (await operators.spec())["leaseTransitions"] == 1
    assert (set(node.launchers), await attempts(chat, 2)) == ({"chat-0-0-0", "chat-1-0-0"}, 2)


@pytest.mark.parametrize("seconds", [600])
@pytest.mark.usefixtures("node")
async def test_an_operator_that_shuts_down_releases_the_lease_at_once(chat: Resource, operators: TwoOperators) -> None:
    await chat.create()
    await chat.until_phase("Running")
    assert await asyncio.to_thread(operators.first.stop) == 0
    await operators.until_leads(operators.second)
    await chat.kubectl("scale", "mi", "chat", "--replicas=2")
    await chat.until(lambda status: status["ready"] == "2/2", "both groups")


async def test_an_operator_that_was_frozen_for_longer_than_its_lease_stops_acting(
    chat: Resource, node: ScriptedNode, operators: TwoOperators
) -> None:
    await chat.create()
    await chat.until_phase("Running")
    assert await attempts(chat, 1) == 1  # The operator writes events after a status, and would be halted between them.
    operators.first.halt()
    try:
        await operators.until_leads(operators.second)
        await chat.kubectl("scale", "mi", "chat", "--replicas=2")
        await chat.until(lambda status: status["ready"] == "2/2", "both groups")
    finally:
        operators.first.go_on()
    await operators.until_leads(operators.first, leads=False)
    rounds = operators.first.metric(ROUNDS)
    await node.fail((await chat.pods())["chat-1-0-0"], 1, "a rank died")
    await chat.until_pods("chat-0-0-0", "chat-1-1-0")
    await chat.until(lambda status: status["ready"] == "2/2", "the next attempt")
    assert (operators.first.metric(ROUNDS), await attempts(chat, 3)) == (rounds, 3)


async def test_a_disconnected_operator_stops_acting_and_another_takes_over(
    chat: Resource, node: ScriptedNode, operators: TwoOperators
) -> None:
    await chat.create()
    await chat.until_phase("Running")
    cut = operators.way.when(lambda _: True, never_answer)
    await operators.until_leads(operators.first, leads=False)
    await operators.until_leads(operators.second)
    operators.way.rules.remove(cut)
    await chat.kubectl("scale", "mi", "chat", "--replicas=2")
    await chat.until(lambda status: status["ready"] == "2/2", "both groups")
    assert (operators.first.metric(LEADING), await attempts(chat, 2)) == (0, 2)
    assert set(node.launchers) == {"chat-0-0-0", "chat-1-0-0"}


@pytest.mark.usefixtures("node")
async def test_a_lease_that_a_user_deletes_is_created_again(chat: Resource, operators: TwoOperators) -> None:
    await asyncio.to_thread(operators.cluster.kubectl, "-n", SYSTEM, "delete", "lease", LEASE)
    await chat.create()
    await chat.until_phase("Running")
    await asyncio.to_thread(wait_until, lambda: operators.cluster.exists("lease", LEASE, "-n", SYSTEM), "the Lease")
    await asyncio.to_thread(
        wait_until, lambda: operators.first.metric(LEADING) + operators.second.metric(LEADING) == 1, "one to act"
    )
