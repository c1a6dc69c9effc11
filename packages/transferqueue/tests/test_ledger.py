"""The account of a task, however long it is, and answers that no message takes."""

import os
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import transferqueue as tq
from hypothesis import given
from hypothesis import strategies as st
from transferqueue.wire.ledger import MAX_REASON_BYTES, cut_reason, dropped_of, ids_of, page_of, runs
from transferqueue.wire.listeners import LocalListener
from transferqueue.wire.messages import (
    Ack,
    Cancel,
    Done,
    Failure,
    Flag,
    IsClosed,
    LedgerPage,
    ReadLedger,
    Reply,
    Welcome,
    encoder,
)
from transferqueue.wire.node import Call, Node, Session

LIMIT = 4096


@given(st.lists(st.integers(0, 30) | st.integers(0, (1 << 63) - 2)))
def test_runs_name_the_same_ids_in_the_same_order(ids: list[int]) -> None:
    assert ids_of(runs(ids)) == ids


def test_each_reason_is_told_once_and_ids_as_runs() -> None:
    first = 1 << 61
    reasons = ["the answer was cut off " * 40, "no reward"]
    dropped = {first + i: reasons[i // 50_000] for i in range(100_000)}
    page = page_of([(first, first + 7)], dropped.items(), [], range(first + 100_000, first + 200_000))
    assert len(encoder.encode(page)) < 2_000
    assert dropped_of(page) == dropped
    assert len(ids_of(page.pending)) == 100_000


@pytest.mark.parametrize("text", ["x", "é", "日", "😀"])
def test_a_reason_is_cut_between_characters(text: str) -> None:
    size = len(text.encode())
    assert cut_reason(text * 1000) == text * min(1000, MAX_REASON_BYTES // size)
    assert cut_reason("a" + text * 1000) == "a" + text * min(1000, (MAX_REASON_BYTES - 1) // size)
    assert cut_reason(text * (MAX_REASON_BYTES // size)) == text * (MAX_REASON_BYTES // size)


def test_a_reason_that_is_no_text_is_refused(queue: tq.Client, name: str) -> None:
    part = queue.partition(name, tasks={"t": ["x"]})
    ids = part.put({"x": np.arange(2)})
    for reason in ("\ud800", 5):
        with pytest.raises(tq.InvalidArgument, match="reason"):
            part.drop(ids, reason)  # type: ignore[arg-type]
    assert part.ledger("t").pending == ids.tolist()


@pytest.mark.parametrize("transport", ["shm", "zmq"])
def test_long_reasons_of_many_drops_are_read_back(store: tq.Server, name: str, transport: Any) -> None:
    """Whole, and once for each sample, they were 300 MB."""
    with tq.connect(store, transport=transport) as client:
        part = client.partition(name, tasks={"t": ["x"]})
        ids = part.put({"x": np.arange(3000)})
        part.drop(ids[::2], "Traceback " * 20_000)
        part.drop(ids[1:3000:2][:10], "short")
        ledger = part.ledger("t")
        long = ("Traceback " * 200)[:MAX_REASON_BYTES]
        wanted = dict.fromkeys(ids[::2].tolist(), long) | dict.fromkeys(ids[1:20:2].tolist(), "short")
        assert ledger.dropped == wanted
        assert ledger.pending == ids[21::2].tolist()


@pytest.mark.parametrize("kind", ["blocking", "async"])
async def test_a_request_that_no_message_takes_is_refused_and_the_client_goes_on(
    store: tq.Server, name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transferqueue.wire.local_session.MAX_BODY_BYTES", LIMIT)
    groups = ["a long name of a group " * 10] * 100
    if kind == "blocking":
        with tq.connect(store, transport="shm") as client:
            part = client.partition(name, tasks={"t": ["x"]})
            with pytest.raises(tq.TooLarge, match="Commit takes"):
                part.put({"x": np.arange(100)}, groups=groups)
            assert len(part.put({"x": np.arange(100)})) == 100
            assert len(part.ledger("t").pending) == 100
    else:
        async with await tq.connect_async(store, transport="shm") as client:
            part = await client.partition(name, tasks={"t": ["x"]})
            with pytest.raises(tq.TooLarge, match="Commit takes"):
                await part.put({"x": np.arange(100)}, groups=groups)
            assert len(await part.put({"x": np.arange(100)})) == 100
            assert len((await part.ledger("t")).pending) == 100


class Service:
    """Answers `ReadLedger` with a page of as many bytes as the partition's number, and `Ack` with as much
    where it can be taken back. `Cancel` apart, all else is answered shortly.
    """

    def __init__(self) -> None:
        self.undone = 0

    def handle(self, call: Call) -> None:
        match call.body:
            case ReadLedger(nbytes):
                call.reply(LedgerPage([], [("x" * nbytes, [])], [], []))
            case Ack(nbytes):
                call.undo = self._undo
                call.reply(LedgerPage([], [("x" * nbytes, [])], [], []))
            case IsClosed(nbytes) if nbytes:
                assert call.session.connection is not None
                assert not call.session.connection.send(b"x" * nbytes)
            case _:
                call.reply(Flag(True))

    def _undo(self) -> None:
        self.undone += 1

    def more(self, call: Call, body: Any, payload: Any) -> None:
        raise AssertionError

    def release(self, session: Session, blocks: Sequence[int]) -> None: ...

    def resume(self, session: Session, pins: Sequence[int]) -> None: ...

    def leave(self, session: Session) -> None: ...

    def forget(self, session: Session) -> None: ...

    def settle(self, now: float) -> float | None:
        return None


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Service]]:
    """The name of a local listener whose messages are at most `LIMIT` bytes, and the service behind it."""
    monkeypatch.setattr("transferqueue.wire.node.MAX_BODY_BYTES", LIMIT)
    monkeypatch.setattr("transferqueue.wire.listeners.MAX_HEADER_BYTES", LIMIT)
    listener = LocalListener(f"transferqueue-test-{secrets.token_hex(8)}")
    node = Node(None, listener, token=None, max_frame_bytes=1 << 20)
    service = Service()
    lifeline, end = os.pipe()
    thread = threading.Thread(target=node.run, args=(service, [lifeline]))
    thread.start()
    yield listener.name, service
    os.close(end)
    thread.join(20)
    assert not thread.is_alive()
    os.close(lifeline)


def test_an_answer_that_no_message_takes_fails_its_request_alone(
    served: tuple[str, Service], speak_locally: Callable[[str], Any], kind_of: Callable[[Reply], str]
) -> None:
    listener, service = served
    peer = speak_locally(listener)
    assert isinstance(peer.hello().body, Welcome)
    assert isinstance(peer.ask(1, ReadLedger(LIMIT - 100, "t")).body, LedgerPage)
    refused = peer.ask(2, ReadLedger(LIMIT, "t"))
    assert kind_of(refused) == "TooLarge"
    assert isinstance(refused.body, Failure)
    assert refused.body.details["limit"] == LIMIT < refused.body.details["nbytes"]
    assert peer.ask(3, IsClosed(0)).body == Flag(True)

    assert kind_of(peer.ask(4, Ack(LIMIT, 1))) == "TooLarge"
    assert service.undone == 1  # what it would have given is taken back, once
    assert kind_of(peer.ask(4, Ack(LIMIT, 1))) == "TooLarge"
    assert peer.ask(5, Cancel(4)).body == Done()
    assert service.undone == 1


def test_a_message_that_is_too_long_ends_its_connection_alone(
    served: tuple[str, Service], speak_locally: Callable[[str], Any]
) -> None:
    """Whatever it is: a length that its prefix cannot say must not end the controller."""
    listener, _ = served
    peer, other = speak_locally(listener), speak_locally(listener)
    peer.hello()
    other.hello()
    peer.send(encoder.encode((1, 0, 20.0, IsClosed(LIMIT + 1))))
    assert peer.hung_up()
    assert other.ask(1, IsClosed(0)).body == Flag(True)
