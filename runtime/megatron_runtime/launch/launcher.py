"""The launcher of a pod: starts, supervises and drains its processes."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import os
import secrets
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import TYPE_CHECKING, Any

from megatron_runtime.errors import CheckpointError, ConfigurationError
from megatron_runtime.launch.device_memory import device_memory
from megatron_runtime.launch.inspection import CheckpointFacts, inspect_source
from megatron_runtime.launch.leadership import Leadership
from megatron_runtime.launch.memory import AvailableMemory, available_memory, usable_cores
from megatron_runtime.launch.options import LaunchOptions
from megatron_runtime.launch.pod_ranks import PodRanks
from megatron_runtime.launch.pod_state import PodFacts, PodState
from megatron_runtime.launch.ports import bind_control, bind_metrics
from megatron_runtime.launch.preflight import plan_engine
from megatron_runtime.launch.tasks import PendingPlan, rank_plan
from megatron_runtime.launch.termination import Outcome
from megatron_runtime.processes.fork_server import ForkServer
from megatron_runtime.processes.parent_link import EXIT_DRAINED, EXIT_FAILURE
from megatron_runtime.processes.supervisor import ChildEnd
from megatron_runtime.wire.security import is_loopback

if TYPE_CHECKING:
    from fastapi import FastAPI

    from megatron_runtime.launch.control_api import SignalSender
    from megatron_runtime.launch.frontends import PodFrontends

logger = logging.getLogger(__name__)

MIN_GRACE = 2.0
"""Minimum seconds for the engines to drain, even if the frontends have used the drain timeout."""
SAME_SIGNAL_SECONDS = 0.3
"""Signals within this time count as one: some parents signal a process and its process group."""
FORCED_EXIT_SECONDS = 10.0
"""Maximum time from a second signal to the exit of the launcher. The kernel then ends its children."""
CLOSING_SECONDS = 1
"""Time that the control API gives its long polls at the end."""


class Launcher:
    """One pod, from its start to its exit code.

    Args:
        announce: Called once when a pod with frontends is ready, with the URL of the OpenAI endpoint.
    """

    def __init__(self, options: LaunchOptions, *, announce: Callable[[str], None] = lambda _: None) -> None:
        self._options = options
        self._announce = announce
        self._state = PodState(
            PodFacts(is_leader=options.identity.is_leader, has_frontends=options.has_first_rank),
        )
        self._ending: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._signalled_at: float | None = None
        self._forced = asyncio.Event()
        self._key = options.identity.coordinator_key
        if self._key is None and options.identity.is_standalone:
            self._key = secrets.token_urlsafe(32)
        self._leadership = Leadership(
            options, self._state, key=self._key, on_failure=self._child_failed, on_change=self._note_restarts
        )
        self._frontends: PodFrontends | None = None
        self._ranks: PodRanks | None = None

    async def run(self) -> int:
        """Serves until a signal or a failure; returns the exit code. All processes have ended then."""
        self._install_signal_handlers()
        try:
            self._options.check()
            outcome = await self._serve()
        except (ConfigurationError, CheckpointError) as error:
            outcome = Outcome.bad_input(error)
        outcome.write(self._options.identity.termination_log)
        if outcome.exit_code != EXIT_DRAINED:
            logger.error("%s: %s", outcome.reason, outcome.message)
        return outcome.exit_code

    def _install_signal_handlers(self) -> None:
        """For the rest of the process: the event loop would remove its handlers before the exit code is returned."""
        loop = asyncio.get_running_loop()

        def handle(*_: object) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._handle_signal)

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, handle)

    async def _serve(self) -> Outcome:
        # Measured before the ranks start: the plan includes their memory.
        available = available_memory()
        inspection = asyncio.create_task(inspect_source(self._options.model, self._options.engine))
        planned: PendingPlan = asyncio.get_running_loop().create_future()
        try:
            # More ranks than cores that import for themselves would slow down the inspection.
            if ForkServer.is_available() or self._options.local_ranks <= usable_cores():
                self._start_ranks(planned)
            await asyncio.to_thread(_import_services)
            await self._bind()
            async with self._control_api():
                await self._until_ending(self._start(inspection, available, planned))
                outcome = await self._ending
                if outcome.exit_code != EXIT_DRAINED:
                    return outcome
                return await self._drain()
        finally:
            inspection.cancel()
            await asyncio.gather(inspection, return_exceptions=True)
            await self._kill()

    def _start_ranks(self, planned: PendingPlan) -> None:
        """Starts the ranks, whose imports take longest; they load the checkpoint once the plan is ready."""
        self._ranks = PodRanks(self._options, self._state, on_end=self._rank_ended, on_change=self._note_restarts)
        self._ranks.start(planned, key=self._key)

    async def _bind(self) -> None:
        """Binds the port of the frontends, and starts the coordinator of a leader."""
        from megatron_runtime.launch.frontends import PodFrontends

        if self._options.has_first_rank:
            self._frontends = PodFrontends(
                self._options, self._state, on_failure=self._child_failed, on_change=self._note_restarts
            )
        identity = self._options.identity
        if identity.is_leader:
            await self._leadership.lead(identity.leader_epoch, identity.lifecycle)

    async def _start(
        self, inspection: asyncio.Task[CheckpointFacts], available: AvailableMemory, planned: PendingPlan
    ) -> None:
        """Sends the plan to the ranks and starts the frontends after the inspection; logs when the pod is ready."""
        facts = await inspection
        device = await asyncio.to_thread(device_memory, self._options.engine)
        plan = plan_engine(self._options, facts, available, device)
        logger.info("%s (%s): %s", self._options.model_name, facts.architecture, plan.describe())
        address = self._coordinator_address()
        planned.set_result(rank_plan(facts, plan, address=address).serialize())
        if self._ranks is None:
            self._start_ranks(planned)
        if self._frontends is not None:
            self._frontends.start(facts.path, plan.max_sequence_length, address=address, key=self._key)
        while not self._state.facts.ready:
            await self._state.wait_for_change(self._state.revision, timeout=60.0)
        logger.info("ready")
        if self._frontends is not None:
            host, port = self._frontends.http_address
            self._announce(f"{self._options.http.scheme}://{host}:{port}/v1")

    def _coordinator_address(self) -> str:
        """The address of the leader, which may be another pod, also later; else that of this pod's coordinator."""
        if (shared := self._options.identity.coordinator_address) is not None:
            return shared
        leader = self._leadership.leader
        assert leader is not None, "a standalone launcher leads"
        return leader.address

    # Events

    def _handle_signal(self) -> None:
        loop = asyncio.get_running_loop()
        if self._signalled_at is None:
            self._signalled_at = loop.time()
            logger.info("draining; a second signal ends the pod at once")
            self._end(Outcome())
        elif loop.time() - self._signalled_at > SAME_SIGNAL_SECONDS:
            self._forced.set()
            loop.call_later(FORCED_EXIT_SECONDS, os._exit, EXIT_FAILURE)

    def _rank_ended(self, rank: int, end: ChildEnd) -> None:
        stopped = end.exit_code == EXIT_DRAINED
        if stopped:
            logger.info("the engine of rank %d was stopped", rank)
        self._end(Outcome(reason="Stopped") if stopped else Outcome.child_failed(end, rank))

    def _child_failed(self, end: ChildEnd) -> None:
        self._end(Outcome.child_failed(end))

    def _end(self, outcome: Outcome) -> None:
        """Set the outcome, if there is none: later ones are consequences of the first."""
        if not self._ending.done():
            self._ending.set_result(outcome)
            self._state.update(is_ending=True, error=outcome.body() if outcome.message else None)

    def _note_restarts(self) -> None:
        supervised = (self._leadership, self._frontends, self._ranks)
        self._state.update(restarts=sum(each.restarts for each in supervised if each is not None))

    # Drain and end

    async def _drain(self) -> Outcome:
        drained = asyncio.create_task(self._drain_in_order())
        forced = asyncio.create_task(self._forced.wait())
        await asyncio.wait({drained, forced}, return_when=asyncio.FIRST_COMPLETED)
        for task in (drained, forced):
            task.cancel()
        results = await asyncio.gather(drained, forced, return_exceptions=True)
        if self._forced.is_set():
            return Outcome(EXIT_FAILURE, "Interrupted", "a second signal interrupted the drain")
        if isinstance(results[0], Exception):
            raise results[0]
        return self._ending.result()

    async def _drain_in_order(self) -> None:
        """Frontends first: they end when their requests are answered. Then the engines, then the coordinator."""
        deadline = time.monotonic() + self._options.drain_timeout
        if self._frontends is not None:
            await self._frontends.drain(self._options.drain_timeout)
        self._state.update(draining=True)  # also of a pod without frontends
        if self._ranks is not None:
            await self._ranks.drain(max(deadline - time.monotonic(), MIN_GRACE))
        await self._leadership.stop()

    async def _kill(self) -> None:
        """Ends the remaining processes; after a drain there are none."""
        if self._ranks is not None:
            await self._ranks.kill()
        if self._frontends is not None:
            await self._frontends.close()
        await self._leadership.close()

    async def _until_ending(self, work: Coroutine[None, None, None]) -> None:
        """Runs ``work`` until it is done or there is an outcome."""
        task = asyncio.create_task(work)
        either: set[asyncio.Future[Any]] = {task, self._ending}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
            return
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    def _signal_sender(self) -> SignalSender | None:
        leader = self._leadership.leader
        return None if leader is None else leader.link

    @contextlib.asynccontextmanager
    async def _control_api(self) -> AsyncIterator[None]:
        """Serves the control API, and the metrics on a port of their own."""
        from megatron_runtime.launch.control_api import create_control_api, create_metrics_api
        from megatron_runtime.launch.metrics import create_exposition

        folder = None if self._frontends is None else self._frontends.metrics_folder.path
        metrics = create_exposition(lambda: self._state.facts, folder)
        identity = self._options.identity
        control = create_control_api(
            self._state,
            self._signal_sender,
            roles=None if identity.is_standalone else self._leadership,
            token=identity.control_token,
            is_local=is_loopback(self._options.private_host),
            metrics=metrics,
        )
        sockets = bind_control(self._options), bind_metrics(self._options)
        logger.info("control API on http://%s:%d", *sockets[0].getsockname()[:2])
        logger.info("metrics on http://%s:%d/metrics", *sockets[1].getsockname()[:2])
        async with _served(control, sockets[0]), _served(create_metrics_api(metrics), sockets[1]):
            yield


@contextlib.asynccontextmanager
async def _served(app: FastAPI, sock: socket.socket) -> AsyncIterator[None]:
    from megatron_runtime.server.http_server import HttpServer

    server = HttpServer(app, graceful_seconds=CLOSING_SECONDS)
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    try:
        yield
    finally:
        server.should_exit = True
        await serving


def _import_services() -> None:
    """Imports the launcher's own services, which takes about as long as a rank takes to import torch."""
    for module in ("launch.frontends", "launch.leader", "launch.control_api", "launch.metrics", "server.http_server"):
        importlib.import_module(f"megatron_runtime.{module}")
