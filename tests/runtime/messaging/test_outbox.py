"""Batches and deferred items of the coordinator's outbox."""

from __future__ import annotations

from megatron_runtime.data_parallel_inference_coordinator.outbox import DEFERRED_BATCH, Outbox
from megatron_runtime.headers import Headers
from megatron_runtime.wire.codec import decode


def taken(outbox: Outbox) -> list[tuple[bytes, Headers, int]]:
    """Peer, type and number of items of each message."""
    failures: list[Exception] = []
    messages = [(peer, decode(frames)) for peer, frames in outbox.drain(failures.append)]
    assert failures == []
    return [(peer, message.header, len(message.args[0])) for peer, message in messages]


def test_consecutive_items_share_a_message() -> None:
    outbox = Outbox()
    outbox.add(b"a", Headers.ENGINE_REPLY, b"1", b"body")
    outbox.add(b"b", Headers.ENGINE_REPLY, b"2", b"body")
    outbox.add(b"a", Headers.ENGINE_REPLY, b"3", b"body")
    outbox.add(b"a", Headers.ABORT_REQUEST, b"4")
    assert taken(outbox) == [
        (b"a", Headers.ENGINE_REPLY, 2),
        (b"a", Headers.ABORT_REQUEST, 1),
        (b"b", Headers.ENGINE_REPLY, 1),
    ]


def test_deferred_items_are_sent_when_they_are_released() -> None:
    outbox = Outbox()
    outbox.defer(b"a", Headers.REPLY_ACK, b"1")
    outbox.defer(b"a", Headers.REPLY_ACK, b"2")
    assert not outbox
    outbox.release()
    assert taken(outbox) == [(b"a", Headers.REPLY_ACK, 2)]
    outbox.release()
    assert not outbox


def test_deferred_items_are_sent_when_there_are_enough() -> None:
    outbox = Outbox()
    for number in range(DEFERRED_BATCH + 1):
        outbox.defer(b"a", Headers.REPLY_ACK, number)
    assert taken(outbox) == [(b"a", Headers.REPLY_ACK, DEFERRED_BATCH)]


def test_a_deferred_item_that_is_withdrawn_is_not_sent() -> None:
    outbox = Outbox()
    outbox.withdraw(b"a", Headers.REPLY_ACK, b"1")
    outbox.defer(b"a", Headers.REPLY_ACK, b"1")
    outbox.defer(b"a", Headers.REPLY_ACK, b"2")
    outbox.withdraw(b"a", Headers.REPLY_ACK, b"1")
    outbox.release()
    assert taken(outbox) == [(b"a", Headers.REPLY_ACK, 1)]


def test_messages_for_a_lost_peer_are_discarded() -> None:
    outbox = Outbox()
    outbox.add(b"a", Headers.REPLY_ACK, b"1")
    outbox.defer(b"a", Headers.REPLY_ACK, b"2")
    outbox.defer(b"b", Headers.REPLY_ACK, b"3")
    outbox.discard(b"a")
    outbox.release()
    assert taken(outbox) == [(b"b", Headers.REPLY_ACK, 1)]


def test_an_item_that_cannot_be_encoded_is_reported_and_the_others_are_sent() -> None:
    outbox, failures = Outbox(), list[Exception]()
    for number in (1, 2**70, 3):
        outbox.add(b"a", Headers.ENGINE_REPLY, number, b"body of %d" % number)
        outbox.add(b"b", Headers.REPLY_ACK, number)
        outbox.put(b"c", Headers.PAUSE, number)
    sent = [(peer, decode(frames)) for peer, frames in outbox.drain(failures.append)]
    assert [(peer, message.args) for peer, message in sent] == [
        (b"a", [[1]]),
        (b"a", [[3]]),
        (b"b", [[1]]),
        (b"b", [[3]]),
        (b"c", [1]),
        (b"c", [3]),
    ]
    assert [message.bodies for peer, message in sent if peer == b"a"] == [[b"body of 1"], [b"body of 3"]]
    assert [type(failure) for failure in failures] == [OverflowError] * 3
    assert not outbox


def test_the_other_items_of_a_message_keep_the_body_that_they_share() -> None:
    outbox, failures, body = Outbox(), list[Exception](), b"shared"
    for number in (1, 2**70, 3):
        outbox.add(b"a", Headers.SUBMIT_REQUEST, number, body, shares=True)
    sent = [decode(frames) for _, frames in outbox.drain(failures.append)]
    assert [(message.args, message.bodies) for message in sent] == [([[1]], [body]), ([[3]], [body])]
    assert [type(failure) for failure in failures] == [OverflowError]
