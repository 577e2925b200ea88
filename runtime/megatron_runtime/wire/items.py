"""The items and reports inside messages, with their validation.

Every field of a received message is checked here, so that the handlers can rely on types and ranges.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from megatron_runtime.headers import EngineState
from megatron_runtime.wire.codec import MAX_BATCH, MalformedMessage, Message, is_list_of_integers

_Item = TypeVar("_Item")
_LARGEST = 2**63 - 1
MAX_TEXT = 4096
"""Most characters of a reason or a name in a message; longer ones are truncated."""


def natural(value: Any, field: str) -> int:
    """A non-negative 63-bit integer."""
    if type(value) is not int or not 0 <= value <= _LARGEST:
        raise MalformedMessage(f"{field} is not a natural number")
    return value


def flag(value: Any, field: str) -> bool:
    """A boolean."""
    if type(value) is not bool:
        raise MalformedMessage(f"{field} is not a boolean")
    return value


def seconds(value: Any, field: str) -> float:
    """A finite, non-negative number of seconds."""
    if type(value) not in (int, float) or not 0 <= value < 1e12:
        raise MalformedMessage(f"{field} is not a number of seconds")
    return float(value)


def text(value: Any, field: str) -> str:
    """A string, truncated to MAX_TEXT characters."""
    if type(value) is not str:
        raise MalformedMessage(f"{field} is not a string")
    return value[:MAX_TEXT]


def uuid_bytes(value: Any) -> bytes:
    """The 16 bytes of a request's UUID."""
    if type(value) is not bytes or len(value) != 16:
        raise MalformedMessage("request id is not 16 bytes")
    return value


def fields(value: Any, count: int, what: str) -> list[Any]:
    """A list of exactly ``count`` fields."""
    if type(value) is not list or len(value) != count:
        raise MalformedMessage(f"{what} is not a list of {count} fields")
    return value


def _with_seed(value: Any, count: int, what: str) -> list[Any]:
    """A list of ``count`` fields, and of a seed or None if it has one more."""
    if type(value) is not list or len(value) <= count:
        return fields(value, count, what)
    *_, seed = fields(value, count + 1, what)
    if seed is not None and (type(seed) is not int or not 0 <= seed < 2**64):
        raise MalformedMessage("seed is not a natural number of 64 bits")
    return value


def arguments(message: Message, count: int) -> list[Any]:
    """The arguments of a message that takes exactly ``count`` and no body."""
    if len(message.args) != count or message.bodies:
        raise MalformedMessage(f"{message.header.name} takes {count} arguments and no body")
    return message.args


def items(message: Message, parse: Callable[[Any], _Item], *, with_bodies: bool = True) -> list[_Item]:
    """The items of a batch message, each with its body frame if the message has those."""
    name = message.header.name
    if len(message.args) != 1 or type(message.args[0]) is not list or len(message.args[0]) > MAX_BATCH:
        raise MalformedMessage(f"{name} takes one list of at most {MAX_BATCH} items")
    raw = message.args[0]
    if len(message.bodies) != (len(raw) if with_bodies else 0):
        raise MalformedMessage(f"{name} has a wrong number of bodies for its items")
    return [parse(item) for item in raw]


class Submission(NamedTuple):
    """client -> coordinator: one new or resubmitted request; the body is a packed RequestBody."""

    uuid: bytes
    streaming: bool
    received: int
    """Number of tokens that the client has received; the body has them too."""
    hashes: list[int]
    """Block hashes of the prompt for prefix routing; may be empty."""
    seed: int | None = None
    """In place of the body's. An item with a seed and an empty body frame has the body of the item before it."""

    @classmethod
    def parse(cls, raw: Any) -> Submission:
        uuid, streaming, received, hashes, *own = _with_seed(raw, 4, "submission")
        if not is_list_of_integers(hashes):
            raise MalformedMessage("block hashes are not a list of integers")
        return cls(uuid_bytes(uuid), flag(streaming, "streaming"), natural(received, "received"), hashes, *own)

    def wire(self) -> tuple[Any, ...]:
        """The fields; without a seed, those that earlier versions accept too."""
        return self[:4] if self.seed is None else tuple(self)


class Assignment(NamedTuple):
    """coordinator -> engine: one request; the body is the client's, with the tokens of other engines."""

    uuid: bytes
    dispatch: int
    """Counts the assignments of this request; replies to an earlier assignment are stale."""
    streaming: bool
    received: int
    """Number of generated tokens that the coordinator has; the body has them too."""
    withheld: int = 0
    """Size of the body if it is withheld until BODIES_NEEDED; the body frame is empty then."""
    seed: int | None = None
    """As in a Submission."""

    @classmethod
    def parse(cls, raw: Any) -> Assignment:
        uuid, dispatch, streaming, received, withheld, *own = _with_seed(raw, 5, "assignment")
        return cls(
            uuid_bytes(uuid),
            natural(dispatch, "dispatch"),
            flag(streaming, "streaming"),
            natural(received, "received"),
            natural(withheld, "withheld"),
            *own,
        )

    def wire(self) -> tuple[Any, ...]:
        """The fields; without a seed, those that earlier versions accept too."""
        return self[:5] if self.seed is None else tuple(self)


class Finished(NamedTuple):
    """engine -> coordinator: one finished request; its body is the serialized merged request."""

    uuid: bytes
    dispatch: int

    @classmethod
    def parse(cls, raw: Any) -> Finished:
        uuid, dispatch = fields(raw, 2, "reply")
        return cls(uuid_bytes(uuid), natural(dispatch, "dispatch"))


class Progress(NamedTuple):
    """engine -> coordinator: tokens of one request, from number ``start`` on; the body is a packed TokenChunk."""

    uuid: bytes
    dispatch: int
    start: int
    length: int

    @classmethod
    def parse(cls, raw: Any) -> Progress:
        uuid, dispatch, start, length = fields(raw, 4, "partial reply")
        return cls(uuid_bytes(uuid), natural(dispatch, "dispatch"), natural(start, "start"), natural(length, "length"))


class Forwarded(NamedTuple):
    """coordinator -> client: a Progress without the fields for engines."""

    uuid: bytes
    start: int
    length: int

    @classmethod
    def parse(cls, raw: Any) -> Forwarded:
        uuid, start, length = fields(raw, 3, "partial reply")
        return cls(uuid_bytes(uuid), natural(start, "start"), natural(length, "length"))


class RequestFailure(NamedTuple):
    """coordinator -> client: one request that failed without a result."""

    uuid: bytes
    kind: str
    """Class name of the error."""
    message: str

    @classmethod
    def parse(cls, raw: Any) -> RequestFailure:
        uuid, kind, message = fields(raw, 3, "failure")
        return cls(uuid_bytes(uuid), text(kind, "kind"), text(message, "message"))


_FIELDS_WITHOUT_DRAFTS = 8


class EngineLoad(NamedTuple):
    """engine -> coordinator: the load of the engine."""

    running: int = 0
    waiting: int = 0
    kv_blocks_total: int = 0
    kv_blocks_used: int = 0
    prompt_tokens: int = 0
    """Prompt tokens computed since the engine started."""
    generated_tokens: int = 0
    """Tokens generated since the engine started."""
    step_seconds: float = 0.0
    """How long the current step has been running; 0 between steps."""
    weight_version: int = 0
    """Version of its weights."""
    draft_tokens: int = 0
    """Tokens drafted since the engine started."""
    accepted_draft_tokens: int = 0
    """Those that were the sampled tokens."""

    @classmethod
    def parse(cls, raw: Any) -> EngineLoad:
        whole = [*raw, 0, 0] if type(raw) is list and len(raw) == _FIELDS_WITHOUT_DRAFTS else raw
        values = zip(cls._fields, fields(whole, len(cls._fields), "engine load"), strict=True)
        return cls._make((seconds if name == "step_seconds" else natural)(value, name) for name, value in values)

    def wire(self) -> Sequence[Any]:
        """The fields; without drafts, those that earlier versions accept too."""
        return self if self.draft_tokens else self[:_FIELDS_WITHOUT_DRAFTS]


class AdapterEntry(NamedTuple):
    """A LoRA adapter that every engine of the service has."""

    name: str
    path: str
    """Of its folder, which every rank can read."""
    generation: int
    """Differs from those of all earlier adapters of the service, also of the same name."""

    @classmethod
    def parse(cls, raw: Any) -> AdapterEntry:
        name, path, generation = fields(raw, 3, "adapter")
        return cls(text(name, "adapter"), text(path, "path"), natural(generation, "generation"))


class AdapterReport(NamedTuple):
    """engine -> coordinator: the adapters of an engine."""

    version: int = 0
    """Of the last assignment by a coordinator; 0: none so far."""
    assigned: Sequence[AdapterEntry] = ()
    own: Sequence[AdapterEntry] = ()
    """Those that it was started with."""

    @classmethod
    def parse(cls, raw: Any) -> AdapterReport:
        version, assigned, own = fields(raw, 3, "adapters")
        return cls(natural(version, "version"), adapter_entries(assigned), adapter_entries(own))


def adapter_entries(raw: Any) -> list[AdapterEntry]:
    """A list of adapters."""
    if type(raw) is not list or len(raw) > MAX_BATCH:
        raise MalformedMessage(f"adapters are not a list of at most {MAX_BATCH}")
    return [AdapterEntry.parse(entry) for entry in raw]


class Registration(NamedTuple):
    """engine -> coordinator: the identity, the state and the requests of an engine."""

    replica_group: int
    attempt: int
    incarnation: str
    """Random per process: distinguishes a restarted engine of the same attempt from the previous one."""
    state: EngineState
    draining: bool
    claims: list[bytes]
    """UUIDs of the requests that it serves or whose results it keeps."""
    load: EngineLoad
    weights_path: str
    """Path of the last weights that it got from a coordinator, if it still has them; else empty."""
    adapters: AdapterReport = AdapterReport()
    """The LoRA adapters that it has."""

    @classmethod
    def parse(cls, message: Message) -> Registration:
        has_adapters = len(message.args) > 8
        replica_group, attempt, incarnation, state, draining, claims, load, path, *adapters = arguments(
            message, 8 + has_adapters
        )
        if type(claims) is not list:
            raise MalformedMessage("claims are not a list")
        return cls(
            natural(replica_group, "replica group"),
            natural(attempt, "attempt"),
            text(incarnation, "incarnation"),
            engine_state(state),
            flag(draining, "draining"),
            [uuid_bytes(uuid) for uuid in claims],
            EngineLoad.parse(load),
            text(path, "weights path"),
            AdapterReport.parse(*adapters) if adapters else AdapterReport(),
        )

    def wire(self) -> Sequence[Any]:
        """The arguments of a REGISTER message; without adapters, those that earlier versions accept too."""
        count = len(self) - (self.adapters == AdapterReport())
        return (*self[:3], self.state.value, *self[4:6], self.load.wire(), *self[7:count])


def engine_state(value: Any) -> EngineState:
    """The engine state of this name."""
    try:
        return EngineState(value)
    except ValueError:
        raise MalformedMessage("unknown engine state") from None
