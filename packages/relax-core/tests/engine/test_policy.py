"""Encoding in a run: media in threads beside the event loop, once a group, given up when nobody waits."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from agentic import EpisodeError, Generation, Limits, Observation, Sampling, Step, Task, run_episode
from omni_processor import Cancelled, MediaError, Sample, cancellation
from relax.engine.decoding import Decoding
from relax.engine.policy import Encoder, Opening, SeatPolicy, shows

FILM = {"type": "video", "video": "film.mp4"}
SECONDS = 20


class Processor:
    """Takes as long as it is told for what has media; keeps the thread of every call."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.threads: list[int] = []
        self.given_up = threading.Event()
        self.begun = threading.Event()
        self.fault: Exception | None = None

    def __call__(self, messages: Any, *, add_generation_prompt: bool) -> Sample:
        return self._made(messages)

    def template_suffix(self, conversation: Any, messages: Any, *, sampled: Any) -> Sample:
        return self._made(messages)

    def decode(self, tokens: Any, *, skip_special_tokens: bool) -> str:
        return "said"

    def _made(self, messages: Any) -> Sample:
        self.threads.append(threading.get_ident())
        media = []
        if shows(messages):
            self.begun.set()
            while not self.go_on.wait(0.01):  # as a decoder looks between two frames
                try:
                    cancellation.check()
                except Cancelled:
                    self.given_up.set()
                    raise
            media = [{"kind": "video", "pixel_values_videos": np.zeros((1, 1), np.float32), "file": b"x"}]
        if self.fault is not None:
            raise self.fault
        return Sample(np.arange(4, dtype=np.int32), media, [], {})


class Seat:
    async def generate(self, request: Any) -> Generation:
        await asyncio.sleep(0)
        return Generation(np.array([7, 8], np.int32), np.zeros(2, np.float32), [(0, 0, 2)], "stop")

    async def abort(self, request_id: str) -> None: ...


class World:
    """Shows something after the first turn, or nothing but its prompt."""

    def __init__(self, content: Any = None) -> None:
        self.content = content
        self.closed = False

    async def reset(self, task: Task) -> Observation:
        return Observation(task.prompt)

    async def step(self, action: Any) -> Step:
        content, self.content = self.content, None
        if content is None:
            return Step(None, 1.0, True)
        return Step(Observation([{"role": "user", "content": content}]), 0.0, False)

    async def close(self) -> None:
        self.closed = True


@pytest.fixture
def processor() -> Processor:
    return Processor()


@pytest.fixture
async def encoder(processor: Processor) -> Any:
    decoding = Decoding(2)
    yield Encoder(processor, decoding)  # type: ignore[arg-type]
    processor.go_on.set()
    await decoding.close()


@pytest.fixture
def play(encoder: Encoder) -> Callable[..., Any]:
    """play(content, opening): one episode, opened by `content`."""

    async def played(
        content: Any, opening: Opening | None = None, world: World | None = None, **limits: Any
    ) -> Any:
        return await run_episode(
            world or World(),
            Task("t", [{"role": "user", "content": content}]),
            SeatPolicy(encoder, opening or Opening(encoder), Seat()),  # type: ignore[arg-type]
            limits=Limits(**limits),
            sampling=Sampling(),
            request_id="e",
            seed=1,
        )

    return played


async def begun(processor: Processor) -> None:
    assert await asyncio.to_thread(processor.begun.wait, SECONDS)


def test_what_shows_something_is_told_from_text() -> None:
    text = {"role": "user", "content": "x"}
    assert not shows([text, {"role": "assistant", "content": None}])
    assert not shows([{"role": "user", "content": [{"type": "text", "text": "x"}]}])
    assert shows([text, {"role": "user", "content": [{"type": "text", "text": "x"}, FILM]}])
    assert shows([{"role": "user", "content": [{"image": "a.png"}]}])


async def test_a_slow_video_stops_no_other_episode(processor: Processor, play: Callable[..., Any]) -> None:
    slow = [asyncio.create_task(play([FILM])), asyncio.create_task(play("text", world=World([FILM])))]
    await begun(processor)
    for _ in range(20):
        episode = await asyncio.wait_for(play("text", world=World("more text")), SECONDS)
        assert episode.turns == 2
    assert not any(task.done() for task in slow)
    processor.go_on.set()
    opened, shown = await asyncio.wait_for(asyncio.gather(*slow), SECONDS)
    assert [len(episode.transcript.media) for episode in (opened, shown)] == [1, 1]
    assert "file" not in opened.transcript.media[0]


async def test_text_is_encoded_without_a_thread(processor: Processor, play: Callable[..., Any]) -> None:
    await play("text", world=World("more"))
    assert processor.threads == [threading.get_ident()] * 2
    processor.go_on.set()
    await play([FILM])
    assert processor.threads[2] != threading.get_ident()


async def test_members_of_a_group_decode_their_opening_once(
    processor: Processor, encoder: Encoder, play: Callable[..., Any]
) -> None:
    opening, content = Opening(encoder), [FILM]
    messages = [{"role": "user", "content": content}]
    members = [asyncio.create_task(opening.encode(messages, add_generation_prompt=True)) for _ in range(6)]
    await begun(processor)
    members[0].cancel()  # who began it leaves, and the others still want it
    await asyncio.gather(members[0], return_exceptions=True)
    processor.go_on.set()
    made = await asyncio.wait_for(asyncio.gather(*members[1:]), SECONDS)
    assert len(processor.threads) == 1
    assert all(one is made[0] for one in made)
    assert await opening.encode(messages, add_generation_prompt=True) is made[0]
    assert await opening.encode(messages, add_generation_prompt=False) is not made[0]


async def test_the_last_member_to_leave_ends_the_decoding(processor: Processor, encoder: Encoder) -> None:
    opening = Opening(encoder)
    messages = [{"role": "user", "content": [FILM]}]
    members = [asyncio.create_task(opening.encode(messages, add_generation_prompt=True)) for _ in range(3)]
    await begun(processor)
    for member in members:
        member.cancel()
    await asyncio.gather(*members, return_exceptions=True)
    assert await asyncio.to_thread(processor.given_up.wait, SECONDS)
    processor.go_on.set()  # whoever comes later begins anew
    assert (await asyncio.wait_for(opening.encode(messages, add_generation_prompt=True), SECONDS)).media


async def test_a_failure_is_that_of_every_member(
    processor: Processor, encoder: Encoder, play: Callable[..., Any]
) -> None:
    processor.fault = MediaError("it is cut off", item="video 0")
    processor.go_on.set()
    opening = Opening(encoder)
    outcomes = await asyncio.gather(*(play([FILM], opening) for _ in range(3)), return_exceptions=True)
    assert all(isinstance(one, EpisodeError) and one.stage == "encode" for one in outcomes)
    assert all("video 0: it is cut off" in str(one) for one in outcomes)


async def test_the_time_limit_of_an_episode_ends_its_decoding(
    processor: Processor, play: Callable[..., Any]
) -> None:
    world = World()
    with pytest.raises(EpisodeError, match=r"at encode: TimeoutError: max_seconds = 0\.2 s passed"):
        await play([FILM], world=world, max_seconds=0.2)
    assert await asyncio.to_thread(processor.given_up.wait, SECONDS)
    assert world.closed
    episode = await play("text", world=World([FILM]), max_seconds=0.2)
    assert (episode.end, episode.transcript.media) == ("time_limit", ())


async def test_closing_ends_what_runs_and_what_waits(processor: Processor) -> None:
    decoding = Decoding(1)
    encoder = Encoder(processor, decoding)  # type: ignore[arg-type]
    messages = [{"role": "user", "content": [FILM]}]
    tasks = [
        asyncio.create_task(encoder.encode(messages, lambda: processor(messages, add_generation_prompt=True)))
        for _ in range(3)
    ]
    await begun(processor)
    await asyncio.wait_for(decoding.close(), SECONDS)
    await decoding.close()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(one, Cancelled | asyncio.CancelledError) for one in outcomes)
    assert len(processor.threads) == 1
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("decoding")]
