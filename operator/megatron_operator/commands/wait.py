"""Waits until a resource reaches its desired state, fails, or the timeout expires."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

from rich.console import Console

from megatron_operator.api.quantity import Duration
from megatron_operator.api.v1alpha1 import ConditionType, Lifecycle, MegatronInferenceStatus, Phase
from megatron_operator.commands.console import program, say
from megatron_operator.commands.errors import CommandFailed
from megatron_operator.commands.lifecycle_verbs import desired_lifecycle
from megatron_operator.conditions import is_auto_suspended, is_idle_stopped
from megatron_operator.kubernetes.api_server import Json, ServerError
from megatron_operator.kubernetes.user_cluster import UserCluster, resources_path
from megatron_operator.lifecycle import SETTLED_STATE
from megatron_operator.status import old_status

ONE_WATCH = 60
"""Seconds after which a watch restarts, so that a stalled one is noticed."""
PAUSE = 1.0
"""Seconds before a retry after an error of the API server."""


@dataclass
class StatusWaiter:
    """Waits until the resource has the desired state of ``generation`` or a later one, and prints its progress."""

    cluster: UserCluster
    namespace: str
    name: str
    desired: Lifecycle
    generation: int
    console: Console
    _told: str = ""

    async def wait(self, timeout: Duration) -> None:
        """Raises CommandFailed with the reason."""
        try:
            async with asyncio.timeout(timeout):
                async for obj in self._versions():
                    if self._is_there(obj):
                        say(self.console, f"{self.name} is {self.desired}")
                        return
        except TimeoutError as error:
            last = self._told or f"its state is unknown; `{program()} doctor` shows whether an operator runs"
            raise CommandFailed(f"{self.name} is not {self.desired} after {timeout.text}: {last}") from error

    async def _versions(self) -> AsyncIterator[Json]:
        """The resource, then each change of it. Waits during an outage of the API server."""
        fields = {"fieldSelector": f"metadata.name={self.name}", "timeoutSeconds": str(ONE_WATCH)}
        while True:
            try:
                obj = await self.cluster.get("MegatronInference", self.namespace, self.name)
                if obj is None:
                    raise CommandFailed(f"{self.name} was deleted meanwhile")
                yield obj
                query = {**fields, "resourceVersion": obj["metadata"]["resourceVersion"]}
                async for event in self.cluster.watch(resources_path(self.namespace), query):
                    if event["type"] == "ERROR":
                        break
                    if event["type"] == "DELETED":
                        raise CommandFailed(f"{self.name} was deleted meanwhile")
                    yield event["object"]
            except ServerError as error:
                self._tell(str(error))
                await asyncio.sleep(PAUSE)

    def _is_there(self, obj: Json) -> bool:
        """Raises CommandFailed when the resource cannot reach the state by itself."""
        desired, status = desired_lifecycle(obj), old_status(obj)
        if desired is not self.desired:
            raise CommandFailed(f"the desired state of {self.name} was changed to {desired} meanwhile")
        if status.observed_generation < self.generation:
            self._tell("the operator has not seen the change yet")
            return False
        if is_reached(desired, status):
            return True
        failed = status.condition(ConditionType.FAILED)
        if failed is not None and failed.status == "True":
            raise CommandFailed(f"{self.name} failed, {failed.reason}: {failed.message}")
        for kind in (ConditionType.PROGRESSING, ConditionType.READY):
            condition = status.condition(kind)
            if condition is not None and (condition.status == "True" or kind is ConditionType.READY):
                self._tell(f"{status.phase}, {condition.reason}: {condition.message}")
                break
        return False

    def _tell(self, words: str) -> None:
        if words != self._told:
            self._told = words
            say(self.console, words)


def is_reached(desired: Lifecycle, status: MegatronInferenceStatus) -> bool:
    """Whether the desired state is reached. The phase shows a transition only after its end."""
    if desired is Lifecycle.STOPPED:
        return status.phase is Phase.STOPPED
    if desired is Lifecycle.RUNNING:
        if is_idle_stopped(status):
            return True  # The next request starts it.
        ready = status.condition(ConditionType.READY)
        is_ready = ready is not None and ready.status == "True"
        return is_ready and (status.engine_state == SETTLED_STATE[desired] or is_auto_suspended(status))
    if status.engine_state != SETTLED_STATE[desired]:
        return False
    return str(status.phase) == str(desired)
