"""What a client does, step by step, without saying how it waits.

An operation is a generator that yields the requests to send at once and is sent their answers; `run` drives
it with blocking waits, `run_async` with awaits. The sync and the async client are thin layers over these.
"""

import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import QueueError
from .channel import Answer, AwaitedChannel, BlockingChannel, Channel, GivenUp


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request to make: to whom, what, and until when (monotonic seconds).

    Attributes:
        quiet: seconds without a word from the peer after which it counts as lost, for what another can do as
            well; None waits until the deadline.
    """

    peer: Any
    body: Any  # a request of the wire, or what the peer's own `submit` takes
    deadline: float
    payload: Any = None
    quiet: float | None = None


class Together(list[Exchange]):
    """Requests of which each needs the others: when one fails the rest is given up, and the operation is sent
    what became of every one, an `Answer` or a `QueueError`.
    """


type Steps[T] = Generator[Sequence[Exchange], list[Any], T]


@dataclass(frozen=True, slots=True)
class Begun[T]:
    """An operation whose first requests are on their way; `run` and `run_async` bring it to its end."""

    channel: Channel
    steps: Steps[T]
    exchanges: Sequence[Exchange]
    pending: list[Any]

    def withdraw(self) -> None:
        """Gives it up; what it may have leased returns."""
        _give_up(self.channel, self.pending)
        self.steps.close()


def begin[T](channel: Channel, steps: Steps[T]) -> Begun[T]:
    """Sends the first requests of an operation, without waiting for what comes."""
    exchanges = next(steps)
    pending: list[Any] = []
    _submit(channel, exchanges, pending)
    return Begun(channel, steps, exchanges, pending)


def run[T](channel: BlockingChannel, operation: Steps[T] | Begun[T]) -> T:
    """Drives an operation to its end, blocking the thread."""
    try:
        return _run(channel, operation)
    except QueueError as error:
        raise _alone(error) from None


def _run[T](channel: BlockingChannel, operation: Steps[T] | Begun[T]) -> T:
    steps, exchanges, pending = _state(operation)
    answers: list[Any] | None = None
    failure: BaseException | None = None
    while True:
        if exchanges is None:
            try:
                exchanges = steps.throw(failure) if failure is not None else steps.send(answers)  # type: ignore[arg-type]
            except StopIteration as finished:
                return finished.value
            pending = []
        try:
            if not pending:
                _submit(channel, exchanges, pending)
            if isinstance(exchanges, Together):
                channel.settle(pending)
            answers, failure = [], None
            for one in pending:
                try:
                    answers.append(channel.result(one))
                except QueueError as error:
                    answers.append(_outcome(exchanges, error))
            _name_the_cause(answers)
        except QueueError as error:
            failure = error.with_traceback(None)
        except BaseException:
            _give_up(channel, pending)
            steps.close()
            raise
        exchanges = None


async def run_async[T](channel: AwaitedChannel, operation: Steps[T] | Begun[T]) -> T:
    """Drives an operation to its end, awaiting its answers."""
    try:
        return await _run_async(channel, operation)
    except QueueError as error:
        raise _alone(error) from None


async def _run_async[T](channel: AwaitedChannel, operation: Steps[T] | Begun[T]) -> T:
    steps, exchanges, pending = _state(operation)
    answers: list[Any] | None = None
    failure: BaseException | None = None
    while True:
        if exchanges is None:
            try:
                exchanges = steps.throw(failure) if failure is not None else steps.send(answers)  # type: ignore[arg-type]
            except StopIteration as finished:
                return finished.value
            pending = []
        try:
            if not pending:
                _submit(channel, exchanges, pending)
            if isinstance(exchanges, Together):
                await channel.settle_async(pending)
            answers, failure = [], None
            for one in pending:
                try:
                    answers.append(await channel.answer(one))
                except QueueError as error:
                    answers.append(_outcome(exchanges, error))
            _name_the_cause(answers)
        except QueueError as error:
            failure = error.with_traceback(None)
        except BaseException:
            _give_up(channel, pending)
            steps.close()
            raise
        exchanges = None


def _alone(error: QueueError) -> QueueError:
    """The error without the frames it came through. Those hold it and what it ended, in a circle that would
    keep what the caller's own frame looks at, views and the memory under them, until a garbage collection.
    """
    error.__context__ = error.__cause__ = None
    return error.with_traceback(None)


def _state[T](
    operation: Steps[T] | Begun[T],
) -> tuple[Steps[T], Sequence[Exchange] | None, list[Any]]:
    """The steps, and what is under way of them."""
    if isinstance(operation, Begun):
        return operation.steps, operation.exchanges, operation.pending
    return operation, None, []


def _submit(channel: Channel, exchanges: Sequence[Exchange], pending: list[Any]) -> None:
    now = time.monotonic()
    for one in exchanges:
        timeout = max(0.0, one.deadline - now)
        pending.append(
            channel.submit(one.peer, one.body, one.payload, timeout=timeout)
            if one.quiet is None
            else channel.submit(one.peer, one.body, one.payload, timeout=timeout, quiet=one.quiet)
        )


def _outcome(exchanges: Sequence[Exchange], error: QueueError) -> QueueError:
    if isinstance(exchanges, Together):
        return error.with_traceback(None)
    raise error


def _name_the_cause(answers: list[Any]) -> None:
    """Requests that were given up failed for the reason that the one did for which they were."""
    errors = [answer for answer in answers if isinstance(answer, QueueError)]
    cause = next((error for error in errors if not isinstance(error, GivenUp)), None)
    if cause is not None and len(errors) > 1:
        answers[:] = [cause if isinstance(answer, GivenUp) else answer for answer in answers]


def _give_up(channel: Channel, pending: list[Any]) -> None:
    for one in pending:
        channel.give_up(one)


def expect[B](answer: Answer, kind: type[B]) -> B:
    """The body of an answer, which must be of that kind."""
    if not isinstance(answer.body, kind):
        raise QueueError(
            f"the server answered {type(answer.body).__name__} where {kind.__name__} was expected"
        )
    return answer.body
