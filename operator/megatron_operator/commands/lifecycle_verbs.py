"""``pause``, ``unpause``, ``suspend``, ``resume``, ``stop`` and ``start``: the desired state of each.

The verbs are the engine's signals: ``unpause`` reverts ``pause``, and ``resume`` reverts ``suspend`` and ends in
Paused. ``start`` sets Running and ``stop`` sets Stopped, from any state.
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
    (Verb.PAUSE, Lifecycle.SUSPENDED): "its requests are held already; `resume` sets it to Paused",
    (Verb.PAUSE, Lifecycle.STOPPED): "there is nothing to pause; `start` it first",
    (Verb.UNPAUSE, Lifecycle.SUSPENDED): "`resume` sets it to Paused, `start` sets it to Running",
    (Verb.UNPAUSE, Lifecycle.STOPPED): "there is nothing to unpause; `start` it",
    (Verb.SUSPEND, Lifecycle.STOPPED): "there is no memory to release; `start` it first",
    (Verb.RESUME, Lifecycle.RUNNING): "there is nothing to resume",
    (Verb.RESUME, Lifecycle.STOPPED): "there is nothing to resume; `start` it",
}


def desired_lifecycle(obj: Json) -> Lifecycle:
    """The desired lifecycle of a resource."""
    return Lifecycle((obj.get("spec") or {}).get("lifecycle") or Lifecycle.RUNNING)


def check_verb(verb: Verb, obj: Json) -> None:
    """Raises CommandFailed when the verb makes no sense for the desired lifecycle."""
    name, desired = obj["metadata"]["name"], desired_lifecycle(obj)
    if obj["metadata"].get("deletionTimestamp"):
        raise CommandFailed(f"{name} is being deleted; there is nothing to {verb}")
    if (why := _REJECTIONS.get((verb, desired))) is not None:
        raise CommandFailed(f"the desired state of {name} is {desired}: {why}")
