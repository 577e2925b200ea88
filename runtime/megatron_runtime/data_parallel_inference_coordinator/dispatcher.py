"""Hands requests to engines, follows their progress, and hands them on when an engine is lost."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_runtime.data_parallel_inference_coordinator.engines import EngineEntry, EngineRegistry
from megatron_runtime.data_parallel_inference_coordinator.outbox import Outbox
from megatron_runtime.data_parallel_inference_coordinator.requests import ClientEntry, RequestEntry
from megatron_runtime.data_parallel_inference_coordinator.routing import Router
from megatron_runtime.data_parallel_inference_coordinator.routing_trace import RoutingTrace
from megatron_runtime.errors import CoordinatorError, EngineError, RequestTimeoutError
from megatron_runtime.headers import Headers
from megatron_runtime.wire.codec import MalformedMessage
from megatron_runtime.wire.items import Assignment, Failure, Finished, Forwarded, Progress, Submission
from megatron_runtime.wire.protocol_errors import ProtocolErrors

CLAIM_SECONDS = 30.0
"""How long an engine that registers with unknown requests is let work on them, until their client shows up."""
LINGER_SECONDS = 30.0
"""How long a request with a name-based UUID is kept after its client vanished: whoever has the name may come for it."""
MOST_LOSSES = 10
"""A request that was there when so many engines were lost is taken for their cause, and fails."""
FAILURE_WEIGHT = 4
"""How many lost engines one counts for that failed in a step instead of just vanishing."""


class Dispatcher:
    """The table of outstanding requests, and every decision about where they are.

    Args:
        request_timeout: Seconds that a request waits for an engine to register before it fails.
    """

    def __init__(
        self,
        *,
        engines: EngineRegistry,
        clients: Mapping[bytes, ClientEntry],
        router: Router,
        outbox: Outbox,
        protocol_errors: ProtocolErrors,
        routing_trace: RoutingTrace,
        request_timeout: float,
    ) -> None:
        self._engines = engines
        self._clients = clients
        self._router = router
        self._outbox = outbox
        self._protocol_errors = protocol_errors
        self._routing_trace = routing_trace
        self._request_timeout = request_timeout
        self.requests: dict[bytes, RequestEntry] = {}
        self.waiting: dict[bytes, RequestEntry] = {}
        """Those without an engine, in the order in which they will get one."""
        self._claims: dict[bytes, tuple[EngineEntry, float]] = {}
        self._orphans: dict[bytes, float] = {}
        """When to give up those whose clients vanished and may come back."""
        self.next_request_id = 0

    # What clients ask for

    def submit(self, client: ClientEntry, submission: Submission, body: bytes, now: float) -> None:
        """Take a new request, or note that the client of a known one is back and what it has seen."""
        known = self.requests.get(submission.uuid)
        if known is not None:
            self._resume_client(known, client, submission)
            return
        entry = RequestEntry(
            uuid=submission.uuid,
            server_id=self.next_request_id,
            client=client.identity,
            streaming=submission.streaming,
            body=body,
            token_count=submission.received,
            hashes=submission.hashes,
            waiting_since=now,
        )
        self.next_request_id += 1
        self.requests[entry.uuid] = entry
        client.owned.add(entry.uuid)
        self._assign(entry)

    def _resume_client(self, entry: RequestEntry, client: ClientEntry, submission: Submission) -> None:
        self._change_client(entry, client)
        if entry.reply is not None:
            self._outbox.add(client.identity, Headers.ENGINE_REPLY, entry.uuid, entry.reply)
            self._drop(entry)
        elif submission.streaming and submission.received < entry.token_count:
            try:
                missing = entry.made_since(submission.received)
            except MalformedMessage as defect:
                self._protocol_errors.add(f"stored tokens: {defect}")
                return
            item = Forwarded(entry.uuid, submission.received, len(missing.tokens))
            self._outbox.add(client.identity, Headers.ENGINE_REPLY_PARTIAL, item, missing.pack())

    def _change_client(self, entry: RequestEntry, client: ClientEntry) -> None:
        before = self._clients.get(entry.client)
        if before is not None and before is not client:
            before.owned.discard(entry.uuid)
            reason = "another client has sent the same request again"
            failure = Failure(entry.uuid, CoordinatorError.__name__, reason)
            self._outbox.add(before.identity, Headers.REQUEST_FAILED, failure)
        self._orphans.pop(entry.uuid, None)
        entry.client = client.identity
        client.owned.add(entry.uuid)

    def abort(self, entry: RequestEntry) -> None:
        """The client wants no more of it. Its engine answers; if there is none, the coordinator does."""
        entry.aborted = True
        if entry.engine is not None:
            self._outbox.add(entry.engine, Headers.ABORT_REQUEST, entry.uuid)
        else:
            self.fail(entry, CoordinatorError("aborted while no engine had it"))

    def forget_client(self, client: ClientEntry, now: float, *, may_return: bool) -> None:
        """The client is gone: nobody waits for its requests any more, unless they may be asked for again by name."""
        for uuid in list(client.owned):
            entry = self.requests.get(uuid)
            if entry is None or entry.client != client.identity:
                continue
            if may_return and not entry.aborted and _is_name_based(uuid):
                entry.client = b""
                self._orphans[uuid] = now + LINGER_SECONDS
            else:
                self._discard(entry)

    def _discard(self, entry: RequestEntry) -> None:
        engine = self._engines.get(entry.engine) if entry.engine is not None else None
        if engine is not None:
            self._release(engine, entry.uuid)
        self._drop(entry)

    # What engines report

    def progress(self, engine: EngineEntry, item: Progress, body: bytes) -> None:
        """Remember new tokens, and pass them on if the client streams."""
        entry = self._owned_entry(engine, item.uuid, item.dispatch)
        if entry is None or item.start + item.length <= entry.token_count:
            return
        if item.start != entry.token_count:
            # Messages in between were lost with a connection: the engine answers a repeated hand-out with all of them.
            self._hand_out(entry, engine)
            return
        entry.chunks.append(body)
        entry.token_count += item.length
        if entry.streaming and entry.client:
            forwarded = Forwarded(item.uuid, item.start, item.length)
            self._outbox.add(entry.client, Headers.ENGINE_REPLY_PARTIAL, forwarded, body)

    def finish(self, engine: EngineEntry, item: Finished, body: bytes) -> None:
        """Pass a result on, or keep it while its client is away, and confirm it."""
        entry = self._owned_entry(engine, item.uuid, item.dispatch)
        if entry is None:
            return
        # An engine that drains waits for this one; others only keep a result for a moment longer.
        confirm = self._outbox.add if engine.draining else self._outbox.add_later
        confirm(engine.identity, Headers.REPLY_ACK, item.uuid)
        if entry.client:
            self._outbox.add(entry.client, Headers.ENGINE_REPLY, item.uuid, body)
            self._drop(entry)
        else:
            entry.reply, entry.engine = body, None
            engine.owned.discard(item.uuid)

    def _owned_entry(self, engine: EngineEntry, uuid: bytes, dispatch: int) -> RequestEntry | None:
        """The entry, if this engine is the one that works on it; tells the engine to stop if somebody else does."""
        entry = self.requests.get(uuid)
        if entry is not None and entry.engine == engine.identity:
            if entry.dispatch == dispatch:
                return entry
            self._protocol_errors.add("reply to an earlier hand-out")
            return None
        claim = self._claims.get(uuid)
        if claim is None or claim[0] is not engine:
            self._protocol_errors.add("reply to a request that this engine does not own")
            self._release(engine, uuid)
        return None

    def _release(self, engine: EngineEntry, uuid: bytes) -> None:
        """Tell an engine that nobody waits for its work on this request, running or finished."""
        self._outbox.add(engine.identity, Headers.REPLY_ACK, uuid)

    def reconcile(self, engine: EngineEntry, claims: list[bytes], now: float) -> None:
        """An engine (re-)registered with these requests: repeat what it owns, keep what clients may still ask for."""
        repeated = [self.requests[uuid] for uuid in engine.owned if uuid in self.requests]
        for uuid in claims:
            entry = self.requests.get(uuid)
            if entry is None:
                self._claims[uuid] = (engine, now + CLAIM_SECONDS)
            elif entry.reply is not None:
                self._release(engine, uuid)
            elif entry.engine is None:
                self.waiting.pop(uuid, None)
                self._hand_out(entry, engine)
            elif entry.engine != engine.identity:
                self._release(engine, uuid)
        for entry in repeated:
            self._hand_out(entry, engine)

    def lose_engine(self, engine: EngineEntry, reason: str, now: float, *, failed: bool) -> None:
        """The engine is gone: its requests go to others, oldest first, with the tokens made so far."""
        self._claims = {uuid: claim for uuid, claim in self._claims.items() if claim[0] is not engine}
        owned = [self.requests[uuid] for uuid in engine.owned if uuid in self.requests]
        engine.owned.clear()
        for entry in sorted(owned, key=lambda entry: entry.server_id):
            entry.engine = None
            entry.losses += FAILURE_WEIGHT if failed else 1
            entry.waiting_since = now
            if entry.aborted:
                self.fail(entry, CoordinatorError("aborted"))
            elif entry.losses >= MOST_LOSSES:
                self.fail(entry, EngineError(f"too many engines were lost while they served it; the last: {reason}"))
            else:
                self._assign(entry)

    # Handing out

    def assign_waiting(self) -> None:
        """An engine became ready: hand out what waited."""
        waiting, self.waiting = self.waiting, {}
        for entry in waiting.values():
            self._assign(entry)

    def _assign(self, entry: RequestEntry) -> None:
        claim = self._claims.pop(entry.uuid, None)
        engine = claim[0] if claim is not None else self._router.pick(self._engines.candidates(), entry.hashes)
        if engine is None:
            self.waiting[entry.uuid] = entry
            return
        self._router.record(engine.identity, entry.hashes)
        self._routing_trace.record(entry.server_id, engine.group, len(entry.hashes))
        self._hand_out(entry, engine)

    def _hand_out(self, entry: RequestEntry, engine: EngineEntry) -> None:
        try:
            body = entry.body_to_hand_out()
        except MalformedMessage as defect:
            self._protocol_errors.add(f"stored request: {defect}")
            self.fail(entry, EngineError(f"its tokens so far can't be handed to another engine: {defect}"))
            return
        entry.dispatch += 1
        entry.engine = engine.identity
        engine.owned.add(entry.uuid)
        assignment = Assignment(entry.uuid, entry.dispatch, entry.streaming)
        self._outbox.add(engine.identity, Headers.SUBMIT_REQUEST, assignment, body)

    # Endings

    def fail(self, entry: RequestEntry, error: Exception) -> None:
        """Tell the client why there will be no answer."""
        if entry.client:
            failure = Failure(entry.uuid, type(error).__name__, str(error))
            self._outbox.add(entry.client, Headers.REQUEST_FAILED, failure)
        self._drop(entry)

    def expire(self, now: float) -> None:
        """Fail what waited too long for an engine, and free engines of requests that no client came back for."""
        for entry in list(self.waiting.values()):
            if now - entry.waiting_since >= self._request_timeout:
                message = f"no engine was there to serve it within {self._request_timeout:g} s"
                self.fail(entry, RequestTimeoutError(message))
        for uuid, (engine, deadline) in list(self._claims.items()):
            if now >= deadline:
                del self._claims[uuid]
                self._release(engine, uuid)
        for uuid in [uuid for uuid, deadline in self._orphans.items() if now >= deadline]:
            self._discard(self.requests[uuid])

    def _drop(self, entry: RequestEntry) -> None:
        self.requests.pop(entry.uuid, None)
        self.waiting.pop(entry.uuid, None)
        self._orphans.pop(entry.uuid, None)
        client = self._clients.get(entry.client)
        if client is not None:
            client.owned.discard(entry.uuid)
        engine = self._engines.get(entry.engine) if entry.engine is not None else None
        if engine is not None:
            engine.owned.discard(entry.uuid)


def _is_name_based(uuid: bytes) -> bool:
    """Whether this is a UUID of version 5 (RFC 9562), which is made from a name and so can be made again."""
    return uuid[6] >> 4 == 5
