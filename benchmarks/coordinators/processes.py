"""The processes of a contender besides its client's: its coordinator, and all its engines."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Callable
from typing import Any


async def start_processes(
    entry: Callable[..., None], *arguments: Any, work: Callable[[str], None], **options: Any
) -> tuple[int, str]:
    """Starts both; returns the coordinator's process id and address once it is ready.

    Args:
        entry: The coordinator; its arguments are a pipe for its address, an event to set, and further arguments.
        work: The engines, which connect to that address.
    """
    spawn = multiprocessing.get_context("spawn")
    (here, there), ready = spawn.Pipe(), spawn.Event()
    coordinator = spawn.Process(target=entry, args=(there, ready, *arguments), kwargs=options, daemon=True)
    coordinator.start()
    address: str = await asyncio.to_thread(here.recv)
    spawn.Process(target=work, args=(address,), daemon=True).start()
    await asyncio.to_thread(ready.wait)
    assert coordinator.pid
    return coordinator.pid, address
