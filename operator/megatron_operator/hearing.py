"""What launchers answer to a look at their pods, and since when those that do not have been silent."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from megatron_operator.engine import EngineClient, EngineUnreachable, PodReport

FIRST_WAIT = 3.0
"""Seconds that a look waits for a pod that answered when it was asked last."""
NEXT_WAIT = 0.5
"""The same for one that did not: what stands still must not hold up what is done about it."""


@dataclass(frozen=True)
class Silence:
    """No answer. ``since`` is when the first question was asked that got none, in seconds since the epoch."""

    since: float
    why: str


Answer = PodReport | Silence | None
"""What came of asking a pod; None when there was nobody to ask yet."""


class Hearing:
    """Asks the pods of one resource, and remembers who is silent; a new one knows of nobody.

    A question that a look does not wait for any longer goes on until its client gives up. ``on_answer`` is called when
    it is answered after all.
    """

    def __init__(self, on_answer: Callable[[], None]) -> None:
        self._on_answer = on_answer
        self._silences: dict[str, Silence] = {}
        self._questions: dict[str, asyncio.Task[PodReport | EngineUnreachable]] = {}

    async def ask(self, launchers: EngineClient, uid: str, address: str) -> PodReport | Silence:
        """The report of the pod with this ``uid``, or its silence. Looks at one pod must not overlap."""
        began = time.time()
        known = self._silences.get(uid)
        if (question := self._questions.get(uid)) is None:
            question = asyncio.create_task(launchers.answer(address), name=f"question to {address}")
            self._questions[uid] = question
        done, _ = await asyncio.wait({question}, timeout=FIRST_WAIT if known is None else NEXT_WAIT)
        if not done:
            question.add_done_callback(lambda late: self._take_late(uid, late))
            return self._note(uid, began, f"control API at {address} does not answer")
        self._questions.pop(uid, None)
        answer = question.result()
        if isinstance(answer, EngineUnreachable):
            return self._note(uid, began, str(answer))
        self._silences.pop(uid, None)
        return answer

    async def forget_others(self, uids: Collection[str]) -> None:
        """Pods besides these are gone."""
        self._silences = {uid: silence for uid, silence in self._silences.items() if uid in uids}
        await self._end(self._questions.keys() - set(uids))

    async def close(self) -> None:
        """End all questions."""
        await self._end(set(self._questions))

    def _note(self, uid: str, began: float, why: str) -> Silence:
        """The cause is the latest; the time stays that of the first."""
        known = self._silences.get(uid)
        silence = Silence(began if known is None else known.since, why)
        self._silences[uid] = silence
        return silence

    def _take_late(self, uid: str, question: asyncio.Task[PodReport | EngineUnreachable]) -> None:
        if self._questions.get(uid) is not question:
            return
        del self._questions[uid]
        if not question.cancelled() and isinstance(question.result(), PodReport):
            self._silences.pop(uid, None)
            self._on_answer()

    async def _end(self, uids: Collection[str]) -> None:
        questions = [self._questions.pop(uid) for uid in uids]
        for question in questions:
            question.cancel()
        await asyncio.gather(*questions, return_exceptions=True)
