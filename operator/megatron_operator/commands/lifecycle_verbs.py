"""``pause``, ``unpause``, ``suspend``, ``resume``, ``stop`` and ``start``: what each wishes for, and from where.

The words are those of the engine: pause and unpause, suspend and resume are each other's way back, so ``resume`` ends
in Paused, as the engine's own signal does. ``start`` leads from anywhere to Running, ``stop`` from anywhere to Stopped.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from megatron_operator.api.v1alpha1 import Lifecycle
from megatron_operator.commands.errors import CommandFailed
from megatron_operator.kubernetes.api_server import Json


class Verb(StrEnum):
    """The commands that change ``spec.lifecycle``, and nothing else."""

    PAUSE = "pause"
    UNPAUSE = "unpause"
    SUSPEND = "suspend"
    RESUME = "resume"
    STOP = "stop"
    START = "start"


DESIRED_STATES: Mapping[Verb, Lifecycle] = {
    Verb.PAUSE: Lifecycle.PAUSED,
    Verb.UNPAUSE: Lifecycle.RUNNING,
    Verb.SUSPEND: Lifecycle.SUSPENDED,
    Verb.RESUME: Lifecycle.PAUSED,
    Verb.STOP: Lifecycle.STOPPED,
    Verb.START: Lifecycle.RUNNING,
}

_REJECTIONS: Mapping[tuple[Verb, Lifecycle], str] = {
    (Verb.PAUSE, Lifecycle.SUSPENDED): "its requests are held already; `resume` leads from there to Paused",
    (Verb.PAUSE, Lifecycle.STOPPED): "there is nothing to pause; `start` it first",
    (Verb.UNPAUSE, Lifecycle.SUSPENDED): "`resume` leads from there to Paused, `start` straight to Running",
    (Verb.UNPAUSE, Lifecycle.STOPPED): "there is nothing to unpause; `start` it",
    (Verb.SUSPEND, Lifecycle.STOPPED): "there is no memory to give back; `start` it first",
    (Verb.RESUME, Lifecycle.RUNNING): "there is nothing to resume",
    (Verb.RESUME, Lifecycle.STOPPED): "there is nothing to resume; `start` it",
}


def desired_lifecycle(obj: Json) -> Lifecycle:
    """What is wished for now."""
    return Lifecycle((obj.get("spec") or {}).get("lifecycle") or Lifecycle.RUNNING)


def check_verb(verb: Verb, obj: Json) -> None:
    """Raises CommandFailed when the verb makes no sense for the resource as it is wished for now."""
    name, desired = obj["metadata"]["name"], desired_lifecycle(obj)
    if obj["metadata"].get("deletionTimestamp"):
        raise CommandFailed(f"{name} is being deleted; there is nothing to {verb}")
    if (why := _REJECTIONS.get((verb, desired))) is not None:
        raise CommandFailed(f"{name} is wished to be {desired}: {why}")
