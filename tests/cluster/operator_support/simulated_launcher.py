"""The runtime's real control API with a simulated engine, for pods without a model."""

import asyncio
import socket
from dataclasses import replace

from megatron_runtime.errors import InvalidStateError
from megatron_runtime.headers import Headers
from megatron_runtime.launch.control_api import create_control_api
from megatron_runtime.launch.pod_state import PodFacts, PodState, RankPhase, RankState, RegisteredReplicaGroup
from megatron_runtime.server.http_server import HttpServer

CONTROL_PORT = 9000
STEPS = {
    ("pause", "RUNNING"): ("PAUSING", "PAUSED"),
    ("unpause", "PAUSED"): ("UNPAUSING", "RUNNING"),
    ("suspend", "PAUSED"): ("SUSPENDING", "SUSPENDED"),
    ("resume", "SUSPENDED"): ("RESUMING", "PAUSED"),
}
LIFECYCLES = {"Running": "RUNNING", "Paused": "PAUSED", "Suspended": "SUSPENDED"}


class SimulatedLauncher:
    """A launcher's control API at ``address``. ``signals`` has the executed signals, in order."""

    def __init__(self, address: str, token: str, *, leader: bool, epoch: int, group: int, lifecycle: str) -> None:
        self.address = address
        self.signals: list[str] = []
        self._group = group
        self._desired = LIFECYCLES[lifecycle]
        self.state = PodState(PodFacts(is_leader=leader, epoch=epoch, ranks={0: RankState(0)}))
        self._app = create_control_api(
            self.state,
            lambda: self if self.state.facts.is_leader else None,
            roles=self,
            token=token,
            metrics=lambda: b"",
        )

    async def start(self) -> None:
        """Returns when the port is open."""
        self._server = HttpServer(self._app, graceful_seconds=0)
        listener = socket.create_server((self.address, CONTROL_PORT))
        self._serving = asyncio.create_task(self._server.serve([listener]))

    async def stop(self) -> None:
        self._server.should_exit = True
        await asyncio.gather(self._serving, return_exceptions=True)

    def load(self, loaded: int, total: int) -> None:
        """Sets the loading progress of the rank."""
        self.state.update_rank(0, phase=RankPhase.LOADING, loaded_bytes=loaded, total_bytes=total)

    def serve(self) -> None:
        """Sets the rank to serving, and the leader's engine to the desired state."""
        self.state.update_rank(0, phase=RankPhase.SERVING)
        if self.state.facts.is_leader:
            self.state.update(frontends_listening=1)
            self.enter(self._desired)

    async def lead(self, epoch: int, lifecycle: str) -> None:
        """The control API's ``LeaderRole``: the engine is in the desired state at once."""
        self._desired = LIFECYCLES[lifecycle]
        self.state.update(is_leader=True, epoch=epoch)
        if self.state.facts.ranks[0].phase is RankPhase.SERVING:
            self.serve()

    async def step_down(self, epoch: int) -> None:
        """The control API's ``LeaderRole``."""
        self.state.update(is_leader=False, epoch=epoch, engine_state=None, replica_groups=())

    def enter(self, state: str) -> None:
        """Sets the state of the engine."""
        groups = self.state.facts.replica_groups or (RegisteredReplicaGroup(self._group, state),)
        self.state.update(engine_state=state, replica_groups=tuple(replace(each, state=state) for each in groups))

    async def send(self, signal: Headers, *, timeout: float, wait: bool) -> None:  # noqa: ARG002
        """The control API's ``SignalSender``."""
        state = self.state.facts.engine_state or ""
        name = signal.name.lower()
        if (name, state) not in STEPS:
            allowed = tuple(known for known, source in STEPS if source == state)
            raise InvalidStateError(f"{name} is not allowed while {state}", state=state, allowed=allowed)
        self.signals.append(name)
        between, after = STEPS[name, state]
        self.enter(between)
        asyncio.get_running_loop().call_later(0.2, self.enter, after)
