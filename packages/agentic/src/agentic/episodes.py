"""Many episodes at once, in one event loop, with a bound on how many."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable

import msgspec

from .cancellation import to_the_end
from .environment import Environment, Task
from .episode import Episode, Limits
from .errors import EpisodeError, InvalidValue
from .generation import Sampling
from .policy import Policy
from .runner import run_episode


class EpisodeStart(msgspec.Struct, frozen=True):
    """One episode to be played: its task, a request id of its own, and its seed (0 <= seed < 2**64)."""

    task: Task
    request_id: str
    seed: int


async def run_episodes(
    starts: Iterable[EpisodeStart],
    make_environment: Callable[[], Environment],
    policy: Policy,
    *,
    limits: Limits,
    sampling: Sampling,
    concurrency: int,
) -> AsyncGenerator[Episode | EpisodeError]:
    """Play episodes, at most `concurrency` at once, and yield each as it finishes.

    A failed episode is yielded as its `EpisodeError` (it names the task and the request id) and the others go
    on. `starts` is read only as places come free. Closing the iterator early (`aclose`, or leaving
    `contextlib.aclosing`) cancels the episodes in flight, each exactly as `run_episode` does, and waits for
    them.

    Args:
        starts: what to play; any iterable, also an endless one.
        make_environment: called once an episode.
        concurrency: >= 1.

    Raises:
        InvalidValue: a concurrency below 1, or a start whose request id is in flight already.
    """
    if concurrency < 1:
        raise InvalidValue(f"concurrency is {concurrency}; expected an integer >= 1")
    pending = iter(starts)
    in_flight: dict[asyncio.Task[Episode | EpisodeError], str] = {}
    finished: asyncio.Queue[asyncio.Task[Episode | EpisodeError]] = asyncio.Queue()

    async def play(start: EpisodeStart) -> Episode | EpisodeError:
        try:
            return await run_episode(
                make_environment(),
                start.task,
                policy,
                limits=limits,
                sampling=sampling,
                request_id=start.request_id,
                seed=start.seed,
            )
        except EpisodeError as error:
            return error

    def fill() -> None:
        while len(in_flight) < concurrency and (start := next(pending, None)) is not None:
            if start.request_id in in_flight.values():
                raise InvalidValue(
                    f"request id {start.request_id!r} is in flight already; expected one for each episode"
                )
            playing = asyncio.create_task(play(start), name=f"episode {start.request_id}")
            in_flight[playing] = start.request_id
            playing.add_done_callback(finished.put_nowait)

    try:
        fill()
        while in_flight:
            playing = await finished.get()
            del in_flight[playing]
            outcome = playing.result()
            fill()
            yield outcome
    finally:
        for playing in in_flight:
            playing.cancel()
        if in_flight:
            await to_the_end(_all_ended(list(in_flight)))


async def _all_ended(playing: list[asyncio.Task[Episode | EpisodeError]]) -> None:
    # Bounded: a cancelled episode ends within its grace_seconds.
    await asyncio.gather(*playing, return_exceptions=True)
