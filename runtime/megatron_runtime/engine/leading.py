"""The first rank of a replica at work for a coordinator, with the others behind it."""

from __future__ import annotations

import asyncio

from megatron_runtime.engine.coordinated_loop import CoordinatedLoop
from megatron_runtime.engine.lock_step import LockStepEngine


async def lead(loop: CoordinatedLoop, engine: LockStepEngine) -> None:
    """Run the loop of this engine as long as the other ranks are there, and let them go at its end.

    Raises:
        EngineError: The loop failed, or, as LostRankError, ranks are gone or late while there is nothing to do; either
            way the loop has it as its failure, and the others were not let go.
    """
    work, touch = asyncio.create_task(loop.run()), asyncio.create_task(engine.keep_in_touch())
    try:
        await asyncio.wait({work, touch}, return_when=asyncio.FIRST_COMPLETED)
        if touch.done():
            loop.failure = touch.exception()
    finally:
        for task in (touch, work):
            task.cancel()
        ends = await asyncio.gather(touch, work, return_exceptions=True)
    for end in ends:
        if isinstance(end, Exception):
            raise end
    await asyncio.to_thread(engine.dismiss)
