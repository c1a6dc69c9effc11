"""A server process: its listeners, one thread, one service that is told about one request at a time.

Here lives what controller and storage units have in common: tokens, protocol versions, the refusal of bytes
that are no message, and the memory of answers that makes a repeated request have one effect.
"""

import hmac
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from ..errors import InvalidArgument, Malformed, ProtocolMismatch, QueueError, Timeout, TooLarge, Unauthorized
from ..ids import IdSet
from .listeners import Connection, LocalListener, Poll, ZmqListener
from .messages import (
    CHUNK,
    MAX_BODY_BYTES,
    MAX_FRAME_BYTES,
    PROTOCOL,
    ArenaHere,
    Cancel,
    CheckFields,
    Chunk,
    Done,
    Failure,
    Goodbye,
    Hello,
    IsClosed,
    ListCandidates,
    Read,
    ReadLedger,
    ReadStats,
    Release,
    Reply,
    ReplyBody,
    Request,
    RequestBody,
    Snapshot,
    UnitAddress,
    Welcome,
    Write,
    decode_request,
    encoder,
)
from .roles import Ledger, Service

log = logging.getLogger("transferqueue")

_REPEATABLE = (Read, ReadStats, ReadLedger, IsClosed, ListCandidates)  # answered afresh: they change nothing
_LOOKS = (Read, ReadStats, ReadLedger, IsClosed, CheckFields, Snapshot)  # what they fail at, they leave alone
_MAX_SESSIONS = 10_000
_MAX_DESCRIPTORS = 250  # beside one message; the system takes 253

Arena = tuple[ArenaHere, int]
"""An arena to tell a local client of, and its descriptor."""


class Answered:
    """An answer that a client may still ask for again.

    Attributes:
        undo: takes back what it gave, or None.
        stays: it is not taken back where it cannot be delivered, only where the client asks for that.
        pins: blocks that it names.
        arenas: where those lie.
    """

    __slots__ = ("arenas", "body", "encoded", "id", "pins", "stays", "undo")

    def __init__(
        self,
        number: int,
        body: ReplyBody,
        undo: Callable[[], None] | None,
        stays: bool,
        pins: Sequence[int],
        arenas: Sequence[Arena],
    ) -> None:
        self.id = number
        self.body = body
        self.undo = undo
        self.stays = stays
        self.pins = pins
        self.arenas = arenas
        try:
            self.encoded = encoder.encode(Reply(number, body))
        except OverflowError:
            self.body = Failure("InvalidArgument", "the answer has a number that is beyond 64 bits", {})
            self.encoded = encoder.encode(Reply(number, self.body))


class Session:
    """What a server remembers of one client, whatever connection it comes by.

    Attributes:
        low: requests below this are finished on the client's side; repeats of them are late duplicates.
        done: requests from there on that are.
        answers: of requests that the client may still repeat.
        waiting: calls not answered yet.
        connection: the latest; None if it has ended.
        arenas: numbers of the arenas whose descriptors the client has.
        released: number of its last release.
        left: it has said goodbye, and only keeps what it looks at.
    """

    __slots__ = (
        "answers", "arenas", "connection", "done", "left", "low", "number", "released", "waiting",
    )  # fmt: skip

    def __init__(self, number: int) -> None:
        self.number = number
        self.low = 0
        self.done = IdSet()
        self.answers: OrderedDict[int, Answered] = OrderedDict()
        self.waiting: dict[int, Call] = {}
        self.connection: Connection | None = None
        self.arenas: set[int] = set()
        self.released = 0
        self.left = False

    @property
    def here(self) -> bool:
        """Whether the client is connected from this host."""
        return self.connection is not None and self.connection.local

    def prune(self, low: int, done: Sequence[int] = ()) -> None:
        """Forgets the answers that the client has."""
        if low > self.low:
            self.low = low
            while self.answers and (first := next(iter(self.answers))) < low:
                del self.answers[first]
            if self.done:
                self.done = IdSet((max(a, low), b) for a, b in self.done.intervals if b > low)
        for number in done:
            if self.answers.pop(number, None) is not None and number >= self.low:
                self.done.add(number)


class Call:
    """One request in a service's hands. Answer it exactly once.

    Attributes:
        deadline: when the client stops waiting, in monotonic seconds.
        undo: set by a service whose answer can be taken back if the client gives up before it arrives; while
            the call waits, what has to be undone if the client gives it up.
        stays: the answer holds also where it cannot be delivered; the client will ask for it again.
        pins: blocks that the answer names; set by the service.
        arenas: arenas that a local client needs for the answer; set by the service.
    """

    __slots__ = (
        "_node",
        "answered",
        "arenas",
        "body",
        "deadline",
        "id",
        "payload",
        "pins",
        "session",
        "stays",
        "undo",
    )

    def __init__(self, node: "Node", session: Session, request: Request, payload: Any) -> None:
        self._node = node
        self.session = session
        self.id = request.id
        self.body: RequestBody = request.body
        self.payload = payload
        self.deadline = time.monotonic() + request.timeout
        self.answered = False
        self.undo: Callable[[], None] | None = None
        self.stays = False
        self.pins: Sequence[int] = ()
        self.arenas: Sequence[Arena] = ()

    @property
    def local(self) -> bool:
        """Whether the client is on this host and sees arenas itself."""
        connection = self.session.connection
        return connection is not None and connection.local

    def reply(self, body: ReplyBody, payload: Any = None) -> None:
        self._node.answer(self, body, payload)

    def fail(self, error: QueueError) -> None:
        self.undo, self.pins, self.arenas = None, (), ()
        details = {name: _sendable(value) for name, value in error.details.items()}
        self.reply(Failure(type(error).__name__, str(error), details))

    def refuse(self) -> None:
        self.fail(Malformed(f"{type(self.body).__name__} is no request for this server"))


class Node:
    """Serves one service until told to stop or until the parent process is gone.

    Args:
        remote: for clients of other hosts, or None.
        local: for clients of this host, or None.
        token: what a client must present, or None.
        incarnation: differs between two lives that do not know each other; None draws one.

    Attributes:
        incarnation: as given or drawn.
        paused: clients of other hosts are not heard for now.
        held: answers other than refusals are kept for now.
        ledger: told of answers that may be asked for again, if set.
    """

    def __init__(
        self,
        remote: ZmqListener | None,
        local: LocalListener | None,
        *,
        token: str | None,
        max_frame_bytes: int,
        incarnation: int | None = None,
    ) -> None:
        self._remote = remote
        self._local = local
        self._token = token
        self._max_frame_bytes = max_frame_bytes
        self.incarnation = secrets.randbits(62) if incarnation is None else incarnation
        self._sessions: OrderedDict[int, Session] = OrderedDict()
        self._by_connection: dict[Connection, Session] = {}
        self._complained: OrderedDict[Connection, None] = OrderedDict()
        self._outbox: list[Callable[[], None]] = []
        self._running = True
        self.undone = False  # something was taken back; whoever settles clears it
        self.units: list[UnitAddress] = []
        self.paused = False
        self.held = False
        self.ledger: Ledger | None = None
        self.poll = Poll()

    def run(self, service: Service, lifelines: Sequence[int]) -> None:
        """Serves. When one of the `lifelines` becomes readable, it stops."""
        self._service = service
        for descriptor in lifelines:
            self.poll.watch(descriptor, self.stop)
        for listener in (self._remote, self._local):
            if listener is not None:
                listener.start(self.poll, self)
        due = service.settle(time.monotonic())
        while self._running:
            more = self._drain()
            if more or self._outbox or self.undone:
                due = service.settle(time.monotonic())
                self._flush()
            wait = None if due is None else max(0.0, due - time.monotonic())
            self.poll.turn(0.0 if more or self.undone else wait)
            self._drain()
            due = service.settle(time.monotonic())
            self._flush()
        for listener in (self._remote, self._local):
            if listener is not None:
                listener.close()
        self.poll.close()

    def _drain(self) -> bool:
        return self._remote is not None and not self.paused and self._remote.drain()

    def stop(self) -> None:
        """Makes `run` return after this turn."""
        self._running = False

    @property
    def sessions(self) -> int:
        """How many clients there are, units included."""
        return sum(not session.left for session in self._sessions.values())

    def session(self, number: int) -> Session | None:
        """What is remembered of a client."""
        return self._sessions.get(number)

    def restore(self, number: int, low: int, answers: Sequence[Answered]) -> Session:
        """A client of an earlier life of this server, which may come back."""
        session = self._sessions[number] = Session(number)
        session.low = low
        session.answers.update((answered.id, answered) for answered in answers)
        return session

    # -- what listeners hear ---------------------------------------------------------------------------------

    def received(self, connection: Connection, header: Any, payload: Any) -> None:
        try:
            request = decode_request(header)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError, MemoryError) as error:
            # MemoryError: it announces more elements than there could ever be.
            self.malformed(connection, f"a header of {len(header)} bytes is no request ({error!r})")
            return
        if not 0 <= request.timeout < 1e9:
            self.malformed(connection, f"a request with a timeout of {request.timeout} s")
            return
        body = request.body
        if isinstance(body, Hello):
            self._greet(connection, body, request.done_below)
            return
        session = self._by_connection.get(connection)
        if session is None or (session.left and not isinstance(body, Release)):
            connection.send(
                encoder.encode(Reply(request.id, Failure("HelloRequired", "say hello first", {})))
            )
            return
        session.prune(request.done_below, request.done)
        if isinstance(body, Release):
            if body.number > session.released:
                session.released = body.number
                self._service.release(session, body.blocks)
        elif request.id < session.low or request.id in session.done:
            return
        elif isinstance(body, Write) and (body.at or request.id in session.waiting):
            self._more(session, request.id, body, payload)
        elif request.id in session.answers:
            answered = session.answers[request.id]
            self._outbox.append(lambda: self._deliver(session, answered, None))
        elif request.id not in session.waiting:
            self._handle(Call(self, session, request, payload))

    def malformed(self, connection: Connection, why: str) -> None:
        self._complain(connection, Malformed(why))

    def ended(self, connection: Connection) -> None:
        if not self._running:
            return
        session = self._by_connection.pop(connection, None)
        self._complained.pop(connection, None)
        if session is not None and session.connection is connection:
            session.connection = None
            session.arenas.clear()
            if connection.local:  # the process is gone, or has closed: it will not come back
                self._forget(session)

    def lost(self, session: Session) -> None:
        """A client of another host cannot be reached any more."""
        if session.connection is not None and self._remote is not None:
            self._remote.forget(session.connection)
        self._part(session)

    def _part(self, session: Session) -> None:
        """Forgets a client; if it lives it is asked to say hello again."""
        connection, session.connection = session.connection, None
        if connection is not None:
            self._by_connection.pop(connection, None)
        self._forget(session)

    # -- requests --------------------------------------------------------------------------------------------

    def _handle(self, call: Call) -> None:
        session = call.session
        session.waiting[call.id] = call
        try:
            match call.body:
                case Goodbye():
                    call.reply(Done())
                    self._outbox.append(lambda: self._leave(session))
                case Cancel(target):
                    self._cancel(session, target)
                    call.reply(Done())
                case _:
                    self._service.handle(call)
        except QueueError as error:
            call.fail(error)
        except Exception as error:
            # Half of it may be done, which no later request may see: this life ends. One that only looks, and
            # was not answered, has done nothing.
            if isinstance(call.body, _LOOKS) and not call.answered:
                log.warning("%s could not be answered", type(call.body).__name__, exc_info=True)
                call.fail(InvalidArgument(f"{type(call.body).__name__} cannot be answered: {error!r}"))
                return
            if self.ledger is not None:
                self.ledger.fatal(call, error)
            raise

    def _more(self, session: Session, number: int, body: Write, payload: Any) -> None:
        call = session.waiting.get(number)
        if call is not None:  # otherwise the block was refused at an earlier part
            try:
                self._service.more(call, body, payload)
            except QueueError as error:
                call.fail(error)

    def _leave(self, session: Session) -> None:
        """A client of this host may look at what it was given for as long as it keeps the connection."""
        if not session.here:
            self._part(session)
        elif not session.left:
            session.left = True
            for call in list(session.waiting.values()):
                self._cancel(session, call.id)
            self._service.leave(session)

    def _forget(self, session: Session) -> None:
        if self._sessions.get(session.number) is session:
            del self._sessions[session.number]
            for call in session.waiting.values():
                call.answered = True
            session.waiting.clear()
            self._service.forget(session)

    def _cancel(self, session: Session, target: int) -> None:
        if target in session.waiting:
            call = session.waiting[target]
            undo = call.undo
            call.fail(Timeout("given up by the client"))
            if undo is not None:
                self._undo(undo)
        elif target in session.answers:
            answered = session.answers[target]
            undo, answered.undo = answered.undo, None
            if undo is not None:
                self._undo(undo)

    def _undo(self, undo: Callable[[], None]) -> None:
        self.undone = True
        undo()

    def _greet(self, connection: Connection, hello: Hello, done_below: int) -> None:
        error: QueueError | None = None
        if hello.protocol != PROTOCOL:
            error = ProtocolMismatch(
                f"the client speaks protocol {hello.protocol}, this server {PROTOCOL}; "
                "install the same transferqueue on both sides",
                got=hello.protocol,
                expected=PROTOCOL,
            )
        elif self._token is not None and not hmac.compare_digest(self._token.encode(), hello.token.encode()):
            error = Unauthorized("the token is missing or wrong; pass the token the server was started with")
        if error is not None:
            self._complain(connection, error)
            return
        before = self._by_connection.get(connection)
        if before is not None and before.number != hello.client:
            self._part(before)  # this connection speaks for another client now
        session = self._sessions.get(hello.client) or Session(hello.client)
        if session.connection is connection:
            self._welcome(connection)  # it came twice, and may be old
            return
        self._sessions[hello.client] = session
        self._sessions.move_to_end(hello.client)
        if session.connection is not None and session.connection is not connection:
            self._by_connection.pop(session.connection, None)
            session.connection.hang_up()
            session.arenas.clear()
        session.connection = connection
        self._by_connection[connection] = session
        connection.greeted = True
        # Answers that the client has are forgotten, so that what is left names exactly the blocks it will
        # still hear of.
        unanswered = set(hello.outstanding)
        session.prune(done_below, [number for number in session.answers if number not in unanswered])
        unheard = [block for answered in session.answers.values() for block in answered.pins]
        self._service.resume(session, [*hello.pins, *unheard])
        if len(self._sessions) > _MAX_SESSIONS:
            # One of this host holds memory that it looks at.
            oldest = next((one for one in self._sessions.values() if not one.here), None)
            if oldest is not None:
                self._part(oldest)
        self._welcome(connection)

    def _welcome(self, connection: Connection) -> None:
        local = "" if self._local is None else self._local.name
        welcome = Welcome(PROTOCOL, self.incarnation, self.units, self._max_frame_bytes, local)
        connection.send(encoder.encode(Reply(0, welcome)))

    def _complain(self, connection: Connection, error: QueueError) -> None:
        """Refuses a connection's message; the log says so once for each connection."""
        if connection not in self._complained:
            log.warning("refused a message: %s: %s", type(error).__name__, error)
            self._complained[connection] = None
            if len(self._complained) > _MAX_SESSIONS:
                self._complained.popitem(last=False)
        connection.send(encoder.encode(Reply(0, Failure(type(error).__name__, str(error), error.details))))

    # -- answers ---------------------------------------------------------------------------------------------

    def answer(self, call: Call, body: ReplyBody, payload: Any) -> None:
        """Keeps the answer until the turn has settled, then sends it."""
        if self._sessions.get(call.session.number) is not call.session:
            # It was found to be gone while this was done: sending to it failed.
            call.answered = True
            if call.undo is not None and not call.stays:
                self._undo(call.undo)
            return
        if call.answered:
            raise AssertionError(f"request {call.id} ({type(call.body).__name__}) is answered twice")
        if payload is not None and len(payload) > self._max_frame_bytes:
            body, payload = _too_large(len(payload), self._max_frame_bytes), None
        call.answered = True
        session = call.session
        session.waiting.pop(call.id, None)
        answered = Answered(call.id, body, call.undo, call.stays, call.pins, call.arenas)
        if answered.body is not body and call.undo is not None:  # it cannot be told
            answered.undo = None
            call.undo()
        limit = MAX_BODY_BYTES if call.local else MAX_FRAME_BYTES
        if len(answered.encoded) > limit:  # the client would take it for nonsense, and hang up
            if call.undo is not None:
                self._undo(call.undo)
            body, payload = _too_large(len(answered.encoded), limit), None
            answered = Answered(call.id, body, None, False, (), ())
        if not isinstance(call.body, _REPEATABLE):
            session.answers[call.id] = answered
            if self.ledger is not None:
                self.ledger.keep(call, answered)
        call.undo = None  # it refers to the call: a circle that only the garbage collector would find, late
        if self.held and isinstance(body, Failure):  # nothing was done, so nothing has to be written first
            self._deliver(session, answered, None)
            return
        self._outbox.append(lambda: self._deliver(session, answered, payload))

    def _deliver(self, session: Session, answered: Answered, payload: Any) -> None:
        connection = session.connection
        if connection is not None and self._put_on(connection, session, answered, payload):
            return
        if answered.undo is not None and not answered.stays:
            # A dead consumer must not get samples. If it only lost its connection it asks again, for others.
            session.answers.pop(answered.id, None)
            if self.ledger is not None:
                self.ledger.void(session, answered.id)
            undo, answered.undo = answered.undo, None
            self._undo(undo)

    @staticmethod
    def _put_on(connection: Connection, session: Session, answered: Answered, payload: Any) -> bool:
        if payload is not None and len(payload) > CHUNK:
            sent = connection.send(answered.encoded)
            for at in range(0, len(payload), CHUNK):
                chunk = encoder.encode(Reply(answered.id, Chunk(at)))
                sent = sent and connection.send(chunk, payload[at : at + CHUNK])
            return sent
        if not connection.local or session.arenas.issuperset(here.arena for here, _ in answered.arenas):
            return connection.send(answered.encoded, payload)
        new = [arena for arena in answered.arenas if arena[0].arena not in session.arenas]
        session.arenas.update(here.arena for here, _ in new)
        while len(new) > _MAX_DESCRIPTORS:
            some, new = new[:_MAX_DESCRIPTORS], new[_MAX_DESCRIPTORS:]
            beside = encoder.encode(Reply(0, Done(), [here for here, _ in some]))
            connection.send(beside, None, [descriptor for _, descriptor in some])
        encoded = encoder.encode(Reply(answered.id, answered.body, [here for here, _ in new]))
        return connection.send(encoded, payload, [descriptor for _, descriptor in new])

    def _flush(self) -> None:
        while self._outbox and not self.held:
            outbox, self._outbox = self._outbox, []
            for send in outbox:
                send()


def _too_large(nbytes: int, limit: int) -> Failure:
    error = TooLarge(
        f"the answer has {nbytes} bytes, more than the {limit} of a message; ask for fewer samples or fields",
        nbytes=nbytes,
        limit=limit,
    )
    return Failure("TooLarge", str(error), error.details)


def _sendable(value: Any) -> Any:
    """What an error tells of a request that was nonsense may be beyond 64 bits."""
    return str(value) if isinstance(value, int) and not -(1 << 63) <= value < 1 << 64 else value
