"""Assigns requests to engines, tracks their progress, and reassigns them when an engine is lost."""

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
from megatron_runtime.wire.items import Assignment, Finished, Forwarded, Progress, RequestFailure, Submission
from megatron_runtime.wire.protocol_errors import ProtocolErrors

CLAIM_SECONDS = 30.0
"""Time for which an engine that registers with unknown requests keeps them, until their client submits them again."""
DRAINING_CLAIM_SECONDS = 3.0
"""The same for an engine that drains, which waits for it: another engine continues what a later client submits."""
LINGER_SECONDS = 30.0
"""Time for which a request with a name-based UUID is kept after its client was lost: any client that knows the name may
submit it again."""
MAX_LOSSES = 10
"""A request fails after this number of its engines were lost, because it is then the likely cause of the losses."""
PUSH_BYTES = 8 * 2**20
"""Bodies of new assignments that an engine gets between two ticks without asking for them. It asks for the others as it
can admit them, so that they delay neither other messages nor its heartbeats."""
FAILURE_WEIGHT = 4
"""An engine that failed in a step counts as this number of lost engines."""


class Dispatcher:
    """Holds the outstanding requests and decides which engine serves each of them.

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
        """Requests without an engine, in the order in which they will be assigned."""
        self._claims: dict[bytes, tuple[EngineEntry, float]] = {}
        self._orphans: dict[bytes, float] = {}
        """Requests whose clients were lost and may reconnect, with the times at which they are discarded."""
        self.next_request_id = 0
        self._dispatches = 0
        """Assignments so far. Their numbers differ also for a UUID that is submitted again, so that the report of an
        engine on the earlier request is not taken for one on the later."""

    # Messages of clients

    def submit(self, client: ClientEntry, submission: Submission, body: bytes, now: float) -> None:
        """Accept a new request, or resume a known one for a client that has reconnected."""
        known = self.requests.get(submission.uuid)
        if known is not None and known.aborted:
            self._inform_previous_client(known, client)
            self.discard(known)  # its engine will report it as aborted
        elif known is not None:
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
            seed=submission.seed,
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
                missing = entry.generated_since(submission.received)
                packed = missing.pack()
            except Exception as defect:
                self._protocol_errors.add_stored("stored tokens", defect)
                return  # the result has them
            item = Forwarded(entry.uuid, submission.received, len(missing.tokens))
            self._outbox.add(client.identity, Headers.ENGINE_REPLY_PARTIAL, item, packed)

    def _inform_previous_client(self, entry: RequestEntry, client: ClientEntry) -> None:
        previous = self._clients.get(entry.client)
        if previous is not None and previous is not client:
            previous.owned.discard(entry.uuid)
            reason = "another client has submitted the same request"
            failure = RequestFailure(entry.uuid, CoordinatorError.__name__, reason)
            self._outbox.add(previous.identity, Headers.REQUEST_FAILED, failure)

    def _change_client(self, entry: RequestEntry, client: ClientEntry) -> None:
        self._inform_previous_client(entry, client)
        self._orphans.pop(entry.uuid, None)
        entry.client = client.identity
        client.owned.add(entry.uuid)

    def abort(self, entry: RequestEntry) -> None:
        """Abort a request for its client. The engine answers; without an engine, the coordinator does."""
        entry.aborted = True
        if entry.engine is not None:
            self._outbox.add(entry.engine, Headers.ABORT_REQUEST, entry.uuid)
        else:
            self.fail(entry, CoordinatorError("the request was aborted before it was assigned to an engine"))

    def forget_client(self, client: ClientEntry, now: float, *, may_return: bool) -> None:
        """Discard the requests of a lost client, except those that a client may submit again by name."""
        for uuid in list(client.owned):
            entry = self.requests.get(uuid)
            if entry is None or entry.client != client.identity:
                continue
            if may_return and not entry.aborted and _is_name_based(uuid):
                entry.client = b""
                self._orphans[uuid] = now + LINGER_SECONDS
            else:
                self.discard(entry)

    def discard(self, entry: RequestEntry) -> None:
        """End a request without an answer."""
        engine = self._engines.get(entry.engine) if entry.engine is not None else None
        if engine is not None:
            self._release(engine, entry.uuid)
        self._drop(entry)

    # Reports of engines

    def progress(self, engine: EngineEntry, item: Progress, body: bytes) -> None:
        """Record new tokens, and forward them if the client streams."""
        entry = self._owned_entry(engine, item.uuid, item.dispatch)
        if entry is None or item.start + item.length <= entry.token_count:
            return
        if item.start != entry.token_count:
            # Messages were lost with a connection: the engine answers a repeated assignment with all tokens.
            self._send(entry, engine, withhold=True)
            return
        entry.chunks.append(body)
        entry.token_count += item.length
        if entry.streaming and entry.client:
            forwarded = Forwarded(item.uuid, item.start, item.length)
            self._outbox.add(entry.client, Headers.ENGINE_REPLY_PARTIAL, forwarded, body)

    def finish(self, engine: EngineEntry, item: Finished, body: bytes) -> None:
        """Forward a result, or keep it while its client is lost, and acknowledge it."""
        entry = self._owned_entry(engine, item.uuid, item.dispatch)
        if entry is None:
            return
        # Only an engine that drains waits for the acknowledgement.
        acknowledge = self._outbox.add if engine.draining else self._outbox.defer
        acknowledge(engine.identity, Headers.REPLY_ACK, item.uuid)
        if entry.client:
            self._outbox.add(entry.client, Headers.ENGINE_REPLY, item.uuid, body)
            self._drop(entry)
        else:
            entry.reply, entry.engine = body, None
            engine.owned.discard(item.uuid)

    def _owned_entry(self, engine: EngineEntry, uuid: bytes, dispatch: int) -> RequestEntry | None:
        """The entry, if this engine serves it. Otherwise the engine is informed that its work is not needed."""
        entry = self.requests.get(uuid)
        if entry is not None and entry.engine == engine.identity:
            if entry.dispatch == dispatch:
                return entry
            self._protocol_errors.add("reply to an earlier assignment")
            return None
        claim = self._claims.get(uuid)
        if claim is None or claim[0] is not engine:
            self._protocol_errors.add("reply to a request that this engine does not own")
            self._release(engine, uuid)
        return None

    def _release(self, engine: EngineEntry, uuid: bytes) -> None:
        """Inform an engine that this request, running or finished, is not needed any more."""
        self._outbox.add(engine.identity, Headers.REPLY_ACK, uuid)

    def reconcile(self, engine: EngineEntry, claims: list[bytes], now: float) -> None:
        """An engine has registered with these requests: assign its own again, and keep unknown ones for a while."""
        repeated = [self.requests[uuid] for uuid in engine.owned if uuid in self.requests]
        for uuid in claims:
            entry = self.requests.get(uuid)
            if entry is None:
                self._claims[uuid] = (engine, now)
            elif entry.reply is not None:
                self._release(engine, uuid)
            elif entry.engine is None:
                self.waiting.pop(uuid, None)
                self._send(entry, engine, withhold=True)
            elif entry.engine != engine.identity:
                self._release(engine, uuid)
        claimed = set(claims)
        for entry in repeated:
            self._send(entry, engine, withhold=entry.uuid in claimed)

    def send_body(self, engine: EngineEntry, uuid: bytes) -> None:
        """An engine needs a body that was withheld."""
        entry = self.requests.get(uuid)
        if entry is None or entry.engine != engine.identity:
            self._release(engine, uuid)
        elif entry.aborted:
            self._release(engine, uuid)
            self.fail(entry, CoordinatorError("the request was aborted before its engine had it"))
        else:
            self._send(entry, engine, withhold=False)

    def lose_engine(self, engine: EngineEntry, reason: str, now: float, *, failed: bool) -> None:
        """Assign the requests of a lost engine to other engines, oldest first, with the tokens generated so far."""
        self._claims = {uuid: claim for uuid, claim in self._claims.items() if claim[0] is not engine}
        owned = [self.requests[uuid] for uuid in engine.owned if uuid in self.requests]
        engine.owned.clear()
        for entry in sorted(owned, key=lambda entry: entry.server_id):
            entry.engine = None
            entry.losses += FAILURE_WEIGHT if failed else 1
            entry.waiting_since = now
            if entry.aborted:
                self.fail(entry, CoordinatorError("the request was aborted"))
            elif entry.losses >= MAX_LOSSES:
                self.fail(
                    entry,
                    EngineError(f"too many engines were lost while they served this request; the last one: {reason}"),
                )
            else:
                self._assign(entry)

    # Assignment

    def assign_waiting(self) -> None:
        """Assign the waiting requests; an engine became ready."""
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
        self._routing_trace.record(entry.server_id, engine.replica_group, len(entry.hashes))
        pushed = engine.pushed + entry.size
        self._send(entry, engine, withhold=claim is not None or (engine.pushed > 0 and pushed > PUSH_BYTES))

    def _send(self, entry: RequestEntry, engine: EngineEntry, *, withhold: bool) -> None:
        """Assign a request to an engine; ``withhold`` its body if the engine may have it, or can't admit it yet."""
        try:
            body, withheld = (b"", entry.size) if withhold else (entry.current_body(), 0)
        except Exception as defect:
            # The requests of a lost engine are assigned one after the other: a defect of one must not stop the others.
            self._protocol_errors.add_stored("stored request", defect)
            reason = defect if isinstance(defect, MalformedMessage) else type(defect).__name__
            self.fail(entry, EngineError(f"its tokens can't be decoded for another engine: {reason}"))
            return
        self._dispatches += 1
        entry.dispatch = self._dispatches
        entry.engine = engine.identity
        engine.owned.add(entry.uuid)
        # An earlier run's acknowledgement that arrived after the assignment would end this run.
        self._outbox.withdraw(engine.identity, Headers.REPLY_ACK, entry.uuid)
        assignment = Assignment(entry.uuid, entry.dispatch, entry.streaming, entry.token_count, withheld, entry.seed)
        shares = entry.seed is not None
        engine.pushed += self._outbox.add(
            engine.identity, Headers.SUBMIT_REQUEST, assignment.wire(), body, shares=shares
        )

    # End of a request

    def fail(self, entry: RequestEntry, error: Exception) -> None:
        """End a request with an error for its client."""
        if entry.client:
            failure = RequestFailure(entry.uuid, type(error).__name__, str(error))
            self._outbox.add(entry.client, Headers.REQUEST_FAILED, failure)
        self._drop(entry)

    def expire(self, now: float) -> None:
        """Fail requests that waited too long for an engine, and drop requests whose clients did not reconnect."""
        for entry in list(self.waiting.values()):
            if now - entry.waiting_since >= self._request_timeout:
                message = f"no engine was available for this request within {self._request_timeout:g} s"
                self.fail(entry, RequestTimeoutError(message))
        for uuid, (engine, since) in list(self._claims.items()):
            if now - since >= (DRAINING_CLAIM_SECONDS if engine.draining else CLAIM_SECONDS):
                del self._claims[uuid]
                self._release(engine, uuid)
        for uuid in [uuid for uuid, deadline in self._orphans.items() if now >= deadline]:
            self.discard(self.requests[uuid])

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
    """Whether this is a UUID of version 5 (RFC 9562), which is derived from a name and so can be derived again."""
    return uuid[6] >> 4 == 5
