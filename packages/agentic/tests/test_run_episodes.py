import asyncio
import itertools
import time
from contextlib import aclosing

import numpy as np
import pytest
from agentic import (
    Encoded,
    Episode,
    EpisodeError,
    EpisodeStart,
    Generation,
    InvalidValue,
    Limits,
    Sampling,
    run_episodes,
)


@pytest.fixture
def starts(task):
    def starts(count):
        return [EpisodeStart(task, f"e{index}", index) for index in range(count)]

    return starts


async def test_every_start_is_played_with_its_own_id_and_seed(starts, echo_environment, policy_of, turns_of):
    found = [
        episode
        async for episode in run_episodes(
            starts(20),
            echo_environment,
            policy_of(turns_of("a", "bye")),
            limits=Limits(),
            sampling=Sampling(),
            concurrency=3,
        )
    ]
    played = {(episode.request_id, episode.seed) for episode in found if isinstance(episode, Episode)}
    assert played == {(f"e{index}", index) for index in range(20)}
    assert len(found) == 20


async def test_episodes_are_yielded_as_they_finish(starts, echo_environment, policy_of):
    turn = {"e0": asyncio.Event(), "e1": asyncio.Event(), "e2": asyncio.Event()}

    async def when_told(request):
        await turn[request.id.split("/")[0]].wait()
        return "bye"

    episodes = run_episodes(
        starts(3),
        echo_environment,
        policy_of(when_told),
        limits=Limits(),
        sampling=Sampling(),
        concurrency=3,
    )
    async with aclosing(episodes):
        for name in ("e2", "e0", "e1"):
            turn[name].set()
            assert (await anext(episodes)).request_id == name


async def test_no_more_run_at_once_than_asked_for_and_starts_are_read_lazily(
    task, echo_environment, policy_of
):
    running = most = taken = 0

    def endless():
        nonlocal taken
        for index in itertools.count():
            taken += 1
            yield EpisodeStart(task, f"e{index}", index)

    async def count(request):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return "bye"

    episodes = run_episodes(
        endless(), echo_environment, policy_of(count), limits=Limits(), sampling=Sampling(), concurrency=4
    )
    async with aclosing(episodes):
        for _ in range(50):
            await anext(episodes)
    assert most == 4
    assert taken <= 50 + 4


async def test_a_failed_episode_is_yielded_and_the_others_go_on(starts, echo_environment, policy_of):
    def fail_one(request):
        if request.id == "e1/0":
            raise OSError("no luck")
        return "bye"

    found = [
        episode
        async for episode in run_episodes(
            starts(4),
            echo_environment,
            policy_of(fail_one),
            limits=Limits(),
            sampling=Sampling(),
            concurrency=2,
        )
    ]
    errors = [episode for episode in found if isinstance(episode, EpisodeError)]
    assert [(error.request_id, error.stage) for error in errors] == [("e1", "generate")]
    assert len(found) == 4


async def test_leaving_early_cancels_what_is_in_flight(starts, echo_environment, policy_of, never):
    environments = []

    def make():
        environments.append(echo_environment())
        return environments[-1]

    async def only_the_first(request):
        if request.id != "e0/0":
            await never.wait()
        return "bye"

    policy = policy_of(only_the_first)
    before = asyncio.all_tasks()
    episodes = run_episodes(starts(8), make, policy, limits=Limits(), sampling=Sampling(), concurrency=3)
    async with aclosing(episodes):
        assert (await anext(episodes)).request_id == "e0"
        await asyncio.sleep(0)  # lets the episode that took the free place begin
    assert sorted(policy.aborted) == [request.id for request in policy.requests[1:]]
    assert all(environment.closes == 1 for environment in environments if environment.resets)
    assert asyncio.all_tasks() == before


@pytest.mark.parametrize("concurrency", [0, -1])
async def test_a_concurrency_below_one_is_refused(starts, echo_environment, policy_of, concurrency):
    episodes = run_episodes(
        starts(1),
        echo_environment,
        policy_of(lambda _: "bye"),
        limits=Limits(),
        sampling=Sampling(),
        concurrency=concurrency,
    )
    with pytest.raises(InvalidValue, match=f"concurrency is {concurrency}"):
        await anext(episodes)


async def test_two_episodes_of_one_id_are_refused_and_nothing_is_left(
    task, echo_environment, policy_of, never
):
    async def stuck(request):
        await never.wait()

    policy, before = policy_of(stuck), asyncio.all_tasks()
    episodes = run_episodes(
        [EpisodeStart(task, "same", 0), EpisodeStart(task, "same", 1)],
        echo_environment,
        policy,
        limits=Limits(),
        sampling=Sampling(),
        concurrency=2,
    )
    with pytest.raises(InvalidValue, match="'same' is in flight already"):
        await anext(episodes)
    assert asyncio.all_tasks() == before


async def test_five_hundred_at_once_cost_little_a_turn(starts, echo_environment):
    turns, concurrency = 8, 500

    class Stub:
        """Does next to nothing, so that what is measured is the runner. Its first turns all meet."""

        def __init__(self):
            self.meeting = asyncio.Barrier(concurrency)
            self.prompt = Encoded(np.arange(256, dtype=np.int32))
            self.observation = Encoded(np.arange(32, dtype=np.int32))
            self.generation = Generation(
                np.arange(64, dtype=np.int32), np.full(64, -1, np.float32), [(0, 0, 64)], "stop"
            )

        async def encode(self, messages, *, add_generation_prompt):
            return self.prompt

        async def encode_observation(self, conversation, action, observation):
            return self.observation

        def decode(self, tokens):
            return "a"

        async def generate(self, request):
            if request.id.endswith("/0"):
                await asyncio.wait_for(self.meeting.wait(), 60)
            else:
                await asyncio.sleep(0)
            return self.generation

        async def abort(self, request_id):
            raise AssertionError("nothing is aborted here")

    began = time.process_time()
    finished = 0
    async for episode in run_episodes(
        starts(concurrency),
        echo_environment,
        Stub(),
        limits=Limits(max_turns=turns),
        sampling=Sampling(),
        concurrency=concurrency,
    ):
        assert isinstance(episode, Episode)
        finished += episode.turns
    seconds = time.process_time() - began
    assert finished == concurrency * turns
    print(f"{seconds / finished * 1e6:.0f} us of CPU a turn, {concurrency} episodes at once")
    assert seconds / finished < 2e-3
