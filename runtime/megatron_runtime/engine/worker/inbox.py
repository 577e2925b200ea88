"""The coordinator's messages that change an engine's requests, in the order of their arrival.

Admitting a request tokenizes its prompt. Requests are therefore admitted in pieces, large ones in the thread that steps
the engine: neither the heartbeats nor the requests that are running wait for all of them.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, NamedTuple

from megatron_runtime.engine.worker.adapter_assignments import AdapterAssignments
from megatron_runtime.engine.worker.coordinator_connection import CoordinatorConnection
from megatron_runtime.engine.worker.loop_requests import AssignedBody, LoopRequest, LoopRequests
from megatron_runtime.engine.worker.protocol import Engine
from megatron_runtime.engine.worker.withheld_bodies import WithheldBodies
from megatron_runtime.headers import Headers
from megatron_runtime.wire.batches import BATCH_BYTES, with_bodies
from megatron_runtime.wire.bodies import RequestBody
from megatron_runtime.wire.codec import Message
from megatron_runtime.wire.items import Assignment, adapter_entries, arguments, items, natural, uuid_bytes

logger = logging.getLogger(__name__)

TURN_SECONDS = 0.1
"""Time after which the requests that are running get a step."""
SMALL_BYTES = 16 * 2**10
"""Requests of this size are admitted without the other thread, whose use takes longer."""
PIECE_REQUESTS = 32
"""Most requests in a piece, between two checks of the time; each takes about 0.2 ms even if it is small."""


class _Arrival(NamedTuple):
    assignment: Assignment
    body: bytes


class _UnpackedBodies:
    """Unpacks a body once that several requests in a row share."""

    def __init__(self) -> None:
        self._packed: bytes | None = None
        self._body: AssignedBody | None = None

    def unpack(self, packed: bytes) -> AssignedBody:
        """Errors as for RequestBody.unpack."""
        if packed is not self._packed or self._body is None:
            self._body, self._packed = AssignedBody(RequestBody.unpack(packed)), packed
        return self._body


class _Admitted(NamedTuple):
    request: LoopRequest | None
    """None: its body is needed."""
    received: int
    """Number of its tokens that the coordinator has."""


class Inbox:
    """Holds messages while the engine is in a step.

    Args:
        in_thread: Runs a function in the thread that steps the engine.
        on_change: Called after requests were aborted or released.
    """

    def __init__(
        self,
        engine: Engine,
        requests: LoopRequests,
        connection: CoordinatorConnection,
        adapters: AdapterAssignments,
        *,
        in_thread: Callable[[Callable[[], Any]], Awaitable[Any]],
        on_change: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._requests = requests
        self._connection = connection
        self._adapters = adapters
        self._in_thread = in_thread
        self._on_change = on_change
        self._queue: deque[_Arrival | Callable[[], Awaitable[object] | object]] = deque()
        self._unpacked = _UnpackedBodies()
        self._withheld = WithheldBodies(connection.ask_for_bodies)

    def __bool__(self) -> bool:
        return bool(self._queue) or self._requests.has_compiled

    def put(self, message: Message) -> None:
        """Queue a message; MalformedMessage if it is invalid. The engine is not used."""
        match message.header:
            case Headers.SET_GENERATION_EPOCH:
                epoch = natural(arguments(message, 1)[0], "epoch")
                self._queue.append(partial(self._engine.set_generation_epoch, epoch))
            case Headers.INCREMENT_STALENESS:
                self._queue.append(self._engine.increment_staleness)
            case Headers.RESET_PREFIX_CACHE:
                self._queue.append(self._engine.invalidate_prefix_cache)
            case Headers.ASSIGN_ADAPTERS:
                version, entries = arguments(message, 2)
                version = natural(version, "version")
                self._queue.append(partial(self._adapters.apply, version, adapter_entries(entries)))
            case Headers.SUBMIT_REQUEST:
                assignments = items(message, Assignment.parse)
                self._queue.extend(_Arrival(*pair) for pair in with_bodies(assignments, message.bodies))
            case header:
                act = self._abort if header is Headers.ABORT_REQUEST else self._release
                self._queue.append(partial(act, items(message, uuid_bytes, with_bodies=False)))

    def forget_withheld(self) -> None:
        """Ask for no bodies any more; the coordinator assigns their requests again."""
        self._withheld.clear()

    async def take_turn(self) -> None:
        """Apply the messages, or as many as the time allows."""
        deadline = time.monotonic() + TURN_SECONDS
        if self._requests.has_compiled:
            begin = partial(self._requests.begin_compiled, PIECE_REQUESTS)
            self._connection.send_replies(await self._in_thread(begin))
        while self._queue and time.monotonic() < deadline:
            if isinstance(self._queue[0], _Arrival):
                await self._admit()
            else:
                act = self._queue.popleft()
                assert not isinstance(act, _Arrival)
                done = act()
                if isinstance(done, Awaitable):
                    await done
        if not self._queue:
            self._unpacked = _UnpackedBodies()
        self._withheld.ask()

    async def _admit(self) -> None:
        piece: list[_Arrival] = []
        size = 0
        while self._queue and isinstance(arrival := self._queue[0], _Arrival):
            if size >= BATCH_BYTES or len(piece) == PIECE_REQUESTS:
                break
            self._queue.popleft()
            piece.append(arrival)
            size += len(arrival.body)
        add_all = partial(self._add_all, piece)
        added = add_all() if size <= SMALL_BYTES else await self._in_thread(add_all)
        self._report(piece, added)

    def _report(self, piece: list[_Arrival], added: list[_Admitted]) -> None:
        for (assignment, _), (request, _) in zip(piece, added, strict=True):
            if request is None:
                self._withheld.add(assignment.uuid, assignment.withheld)
            else:
                self._withheld.remove(assignment.uuid)
        known = [(request, received) for request, received in added if request is not None]
        self._connection.send_replies([request for request, _ in known if request.reply is not None])
        self._connection.send_progress(
            [
                (request, received, request.made.since(received))
                for request, received in known
                if request.reply is None and received < len(request.made.tokens)
            ]
        )

    def _add_all(self, piece: list[_Arrival]) -> list[_Admitted]:
        return [self._add(assignment, body) for assignment, body in piece]

    def _add(self, assignment: Assignment, packed: bytes) -> _Admitted:
        if assignment.withheld:
            return _Admitted(self._requests.resume(assignment), assignment.received)
        try:
            return _Admitted(*self._requests.add(assignment, self._unpacked.unpack(packed)))
        except Exception as error:
            # An invalid request must not affect others. The text of the error may quote the request and is for its
            # client only.
            logger.info("refused a request: %s", type(error).__name__)
            return _Admitted(self._requests.refuse(assignment, error), 0)

    def _abort(self, uuids: list[bytes]) -> None:
        for uuid in uuids:
            self._requests.abort(uuid)
            self._withheld.ask_now(uuid)  # the coordinator then ends the request
        self._on_change()

    def _release(self, uuids: list[bytes]) -> None:
        for uuid in uuids:
            self._requests.release(uuid)
            self._withheld.remove(uuid)
        self._on_change()
