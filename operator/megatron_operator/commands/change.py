"""The commands that change the wish, and wait until it is fulfilled."""

from __future__ import annotations

from rich.console import Console

from megatron_operator.api.quantity import Duration
from megatron_operator.commands.console import say
from megatron_operator.commands.failure import CommandRefused, existing
from megatron_operator.commands.follow import Follower
from megatron_operator.commands.wish import TARGETS, Verb, check_sense, wish_of
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
    check_sense(verb, obj)
    wish = TARGETS[verb]
    if wish_of(obj) is wish:
        say(console, f"{name} is wished to be {wish} already")
    else:
        obj = await cluster.set_spec(namespace, name, {"lifecycle": wish.value})
        hint = "; its requests wait on: `unpause` answers them" if verb is Verb.RESUME else ""
        say(console, f"{name} is wished to be {wish} now{hint}")
    if wait:
        await Follower(cluster, namespace, name, wish, obj["metadata"]["generation"], console).wait(patience)
