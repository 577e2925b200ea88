"""The commands that change the wish, and wait until it is fulfilled."""

from __future__ import annotations

from rich.console import Console

from megatron_operator.api.quantity import Duration
from megatron_operator.commands.console import say
from megatron_operator.commands.errors import CommandRefused, existing
from megatron_operator.commands.lifecycle_verbs import DESIRED_STATES, Verb, check_verb, desired_lifecycle
from megatron_operator.commands.wait import StatusWaiter
from megatron_operator.kubernetes.user_cluster import UserCluster


async def change(
    cluster: UserCluster, namespace: str, name: str, verb: Verb, *, wait: bool, timeout: str, console: Console
) -> None:
    """Change ``spec.lifecycle``; with ``wait``, return when it is so. Raises CommandFailed, WorldError."""
    try:
        patience = Duration(timeout)
    except ValueError as error:
        raise CommandRefused(f"--timeout {timeout}: {error}") from error
    obj = await existing(cluster, namespace, name)
    check_verb(verb, obj)
    desired = DESIRED_STATES[verb]
    if desired_lifecycle(obj) is desired:
        say(console, f"{name} is wished to be {desired} already")
    else:
        obj = await cluster.set_spec(namespace, name, {"lifecycle": desired.value})
        hint = "; its requests wait on: `unpause` answers them" if verb is Verb.RESUME else ""
        say(console, f"{name} is wished to be {desired} now{hint}")
    if wait:
        await StatusWaiter(cluster, namespace, name, desired, obj["metadata"]["generation"], console).wait(patience)
