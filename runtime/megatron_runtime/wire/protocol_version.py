"""The versions of the messages between clients, coordinator and engines.

The first argument of CONNECT, CONNECT_ACK, REGISTER and REGISTER_ACK has the versions of the sender; it is checked
before all others, so that these may change. The form of the refusals (a text) never changes. Both sides use the newest
version that both speak.

A change that an earlier version would refuse or ignore is a new version. A release speaks all versions of the release
before it, so that replica groups can be replaced one after the other.
"""

from __future__ import annotations

from typing import NamedTuple

from megatron_runtime.wire.codec import MalformedMessage, Message
from megatron_runtime.wire.items import fields, natural


class Protocol(NamedTuple):
    """The versions that a peer speaks."""

    oldest: int
    newest: int

    def __str__(self) -> str:
        if not self.newest:
            return "no version"
        return f"version {self.newest}" if self.oldest == self.newest else f"versions {self.oldest} to {self.newest}"

    @classmethod
    def first_of(cls, message: Message) -> tuple[Protocol, Message]:
        """The versions of the sender, and the message without them; MalformedMessage without valid ones."""
        if not message.args:
            raise MalformedMessage(f"{message.header.name} has no versions")
        raw, *rest = message.args
        oldest, newest = fields(raw, 2, "versions")
        versions = cls(natural(oldest, "version"), natural(newest, "version"))
        return versions, Message(message.header, rest, message.bodies)

    def why_not(self, peer: Protocol) -> str | None:
        """Why this coordinator and a peer have no common version, and what to do; None if they have one."""
        if self.oldest <= peer.newest and peer.oldest <= self.newest:
            return None
        return (
            f"the peer speaks {peer} of the protocol, the coordinator {self}; install the client library, or use the "
            "image, of the coordinator's release"
        )


OWN = Protocol(1, 1)
"""The versions of this release."""
NONE = Protocol(0, 0)
"""Of peers from before there were versions: the first argument of their CONNECT and REGISTER is a number."""
