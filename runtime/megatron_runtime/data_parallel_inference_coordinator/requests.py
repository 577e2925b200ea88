"""The coordinator's records of clients and outstanding requests."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_runtime.wire.bodies import RequestBody, TokenChunk
from megatron_runtime.wire.codec import MalformedMessage


@dataclass(eq=False, slots=True)
class RequestEntry:
    """One request, from its submission until its reply is forwarded.

    The coordinator routes on header frames and decodes no body on the way. It keeps the request's body and the frames
    of the partial replies as they arrived: with them it assigns the request of a lost engine to another one at once,
    which continues after the tokens generated so far. Fetching them from the client would cost a round trip, and a
    client that does not stream has no tokens. The cost is memory for outstanding requests: about 6 KB for a prompt of
    2048 tokens and 60 bytes per generated token.
    """

    uuid: bytes
    server_id: int
    client: bytes
    """Socket identity; empty while the client is lost."""
    streaming: bool
    body: bytes
    """The choices of one request share it until they have tokens."""
    token_count: int
    """Tokens generated so far: those in the body and those in ``chunks``."""
    hashes: list[int]
    seed: int | None
    """In place of the body's."""
    waiting_since: float
    """When the request began to wait for an engine the last time."""
    chunks: list[bytes] = field(default_factory=list)
    engine: bytes | None = None
    dispatch: int = 0
    losses: int = 0
    """Engines that were lost while they served it."""
    reply: bytes | None = None
    """The result, if it arrived while the client was lost."""
    aborted: bool = False
    """The client aborted the request, and its engine was informed."""

    def current_body(self) -> bytes:
        """The body with all tokens generated so far.

        Raises:
            MalformedMessage: The body or a partial reply can't be decoded, or they are too large together.
        """
        if self.chunks:
            request = RequestBody.unpack(self.body)
            for packed in self.chunks:
                request.generated.extend(TokenChunk.unpack(packed))
            try:
                self.body = request.pack()
            except ValueError as error:
                raise MalformedMessage(f"the request with its tokens so far is too large: {error}") from error
            self.token_count = len(request.generated.tokens)
            self.chunks = []
        return self.body

    @property
    def size(self) -> int:
        """About the bytes of `current_body`."""
        return len(self.body) + sum(map(len, self.chunks))

    def generated_since(self, start: int) -> TokenChunk:
        """The tokens from number ``start`` on, for a client that lost partial replies.

        Raises:
            MalformedMessage: The body or a partial reply can't be decoded.
        """
        return RequestBody.unpack(self.current_body()).generated.since(start)


@dataclass(eq=False)
class ClientEntry:
    """One connected client."""

    identity: bytes
    last_seen: float
    subscribed: bool = False
    sent_revision: int = -1
    owned: set[bytes] = field(default_factory=set)
    """UUIDs of its outstanding requests."""
