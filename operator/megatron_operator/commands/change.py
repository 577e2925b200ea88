"""The commands that change ``spec.lifecycle`` and wait for the engine."""

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
    """Change ``spec.lifecycle``. With ``wait``, return when the state is reached.

    Raises CommandFailed and AdapterError.
    """
    try:
        patience = Duration(timeout)
    except ValueError as error:
        raise CommandRefused(f"--timeout {timeout}: {error}") from error
    obj = await existing(cluster, namespace, name)
    check_verb(verb, obj)
    desired = DESIRED_STATES[verb]
    if desired_lifecycle(obj) is desired:
        say(console, f"the desired state of {name} is {desired} already")
    else:
        obj = await cluster.set_spec(namespace, name, {"lifecycle": desired.value})
        hint = "; its requests still wait: `unpause` continues them" if verb is Verb.RESUME else ""
        say(console, f"the desired state of {name} is now {desired}{hint}")
    if wait:
        await StatusWaiter(cluster, namespace, name, desired, obj["metadata"]["generation"], console).wait(patience)
