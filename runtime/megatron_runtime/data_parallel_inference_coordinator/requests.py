"""The coordinator's memory of each outstanding request."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_runtime.wire.bodies import RequestBody, TokenChunk


@dataclass(eq=False, slots=True)
class RequestEntry:
    """One request from its submission until its reply was forwarded.

    The coordinator routes on header frames and never looks into a body on the way. It keeps, though, the request's body
    and the frames of the partial replies, packed as they came: with those it hands a lost engine's request to another
    one at once, to go on from the tokens made so far. Asking the client for them instead would cost a round trip, and a
    client that doesn't stream has none. The price is memory, for outstanding requests only: a prompt of 2048 tokens
    takes about 6 KB, a generated token about 60 bytes.
    """

    uuid: bytes
    server_id: int
    client: bytes
    """Socket identity; empty while it waits for its client to come back."""
    streaming: bool
    body: bytes
    token_count: int
    """Tokens made so far: those in the body and those in ``chunks``."""
    hashes: list[int]
    waiting_since: float
    """When it last began to wait for an engine."""
    chunks: list[bytes] = field(default_factory=list)
    engine: bytes | None = None
    dispatch: int = 0
    losses: int = 0
    """Engines that were lost while they worked on it."""
    reply: bytes | None = None
    """Its result, which came while its client was away."""
    aborted: bool = False
    """The client wants no more of it; its engine was told."""

    def body_to_hand_out(self) -> bytes:
        """The body with all tokens made so far in it.

        Raises:
            MalformedMessage: The body or a partial reply can't be read.
        """
        if self.chunks:
            request = RequestBody.unpack(self.body)
            for packed in self.chunks:
                request.generated.extend(TokenChunk.unpack(packed))
            self.body = request.pack()
            self.token_count = len(request.generated.tokens)
            self.chunks = []
        return self.body

    def made_since(self, start: int) -> TokenChunk:
        """The tokens from number ``start`` on, for a client that lost some partial replies.

        Raises:
            MalformedMessage: The body or a partial reply can't be read.
        """
        return RequestBody.unpack(self.body_to_hand_out()).generated.since(start)


@dataclass(eq=False)
class ClientEntry:
    """One connected client."""

    identity: bytes
    last_seen: float
    subscribed: bool = False
    told_revision: int = -1
    owned: set[bytes] = field(default_factory=set)
    """UUIDs of its outstanding requests."""
