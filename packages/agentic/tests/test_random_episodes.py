"""Thousands of random episodes: not one token is marked as what it is not.

The random policy samples only ids >= SAMPLED and encodes only ids below, so every token says by itself who
wrote it. It also writes down every call, from which the transcript is rebuilt token by token.
"""

import asyncio
import itertools

import numpy as np
import pytest
from agentic import (
    Encoded,
    EpisodeEnd,
    Generation,
    Limits,
    Observation,
    Sampling,
    Step,
    Task,
    run_episode,
)
from hypothesis import given, settings
from hypothesis import strategies as st

SAMPLED = 1000
EPISODES_AN_EXAMPLE = 25


class RandomPolicy:
    def __init__(self, rng):
        self.rng = rng
        self.calls = []  # ("shown", Encoded) and ("sampled", request, Generation), in order

    def encoded(self, low):
        count = int(self.rng.integers(low, 12))
        media = [object() for _ in range(int(self.rng.integers(0, 3)))]
        encoded = Encoded(self.rng.integers(0, SAMPLED, count, dtype=np.int32), media)
        self.calls.append(("shown", encoded))
        return encoded

    async def encode(self, messages, *, add_generation_prompt):
        return self.encoded(1)

    async def encode_observation(self, conversation, action, observation):
        assert action.tokens.min() >= SAMPLED
        return self.encoded(0)

    def decode(self, tokens):
        return " ".join(map(str, tokens))

    async def generate(self, request):
        for _ in range(int(self.rng.integers(0, 3))):
            await asyncio.sleep(0)
        limit = request.sampling.max_new_tokens
        reason = str(self.rng.choice(["stop", "length", "abort"], p=[0.85, 0.1, 0.05]))
        count = limit if reason == "length" else int(self.rng.integers(reason != "abort", limit + 1))
        cuts = np.unique(self.rng.integers(1, count, 3)) if count > 1 else np.zeros(0, int)
        edges = [0, *cuts.tolist(), count] if count else []
        version = int(self.rng.integers(0, 3))
        spans = []
        for start, end in itertools.pairwise(edges):
            spans.append((version, start, end))
            version += int(self.rng.integers(0, 2))
        generation = Generation(
            self.rng.integers(SAMPLED, 2 * SAMPLED, count, dtype=np.int32),
            -self.rng.random(count, dtype=np.float32) - 0.001,
            spans,
            reason,  # pyright: ignore[reportArgumentType]
        )
        self.calls.append(("sampled", request, generation))
        return generation

    async def abort(self, request_id):
        raise AssertionError("nothing is aborted here")


class RandomEnvironment:
    def __init__(self, rng):
        self.rng = rng
        self.rewards = []

    async def reset(self, task):
        return Observation(task.prompt)

    async def step(self, action):
        assert (action.transcript.tokens[-len(action.tokens) :] == action.tokens).all()
        self.rewards.append(float(self.rng.integers(0, 8)) / 4)
        done = bool(self.rng.random() < 0.15)
        observation = None if done else Observation([{"role": "tool", "content": "x"}])
        return Step(observation, self.rewards[-1], done)

    async def close(self):
        pass


async def play_and_check(seed, index):
    rng = np.random.default_rng([seed, index])
    policy, environment = RandomPolicy(rng), RandomEnvironment(rng)
    limits = Limits(max_turns=int(rng.integers(1, 9)), max_tokens=int(rng.integers(13, 90)))
    sampling = Sampling(max_new_tokens=int(rng.integers(1, 15)))
    episode = await run_episode(
        environment,
        Task("t", [{"role": "user", "content": "x"}]),
        policy,
        limits=limits,
        sampling=sampling,
        request_id=f"{seed}-{index}",
        seed=seed,
    )
    transcript = episode.transcript
    response = transcript.tokens[transcript.prompt_length :]

    # Every token says itself who wrote it.
    assert (transcript.loss_mask == (response >= SAMPLED)).all()

    # Rebuild all columns from the calls, leaving out an observation that no turn followed.
    calls = policy.calls
    if calls[-1][0] == "shown":
        assert episode.end is EpisodeEnd.CONTEXT_FULL
        calls = calls[:-1]
    rows, media = [], []
    for kind, *call in calls:
        if kind == "shown":
            rows += [(token, 0.0, -1) for token in call[0].tokens.tolist()]
            media += call[0].media
            continue
        request, generation = call
        assert request.tokens.tolist() == [token for token, *_ in rows], "the prompt is what is there so far"
        assert request.media == media
        assert request.sampling.max_new_tokens == min(sampling.max_new_tokens, limits.max_tokens - len(rows))
        version_of = {at: version for version, start, end in generation.spans for at in range(start, end)}
        pairs = zip(generation.tokens.tolist(), generation.logprobs.tolist(), strict=True)
        rows += [(token, logprob, version_of[at]) for at, (token, logprob) in enumerate(pairs)]
    versions = np.full(transcript.response_length, -1)
    for version, start, end in transcript.versions.tolist():
        versions[start:end] = version
    assert transcript.tokens.tolist() == [token for token, *_ in rows]
    assert transcript.logprobs.tolist() == [logprob for _, logprob, _ in rows[transcript.prompt_length :]]
    assert versions.tolist() == [version for *_, version in rows[transcript.prompt_length :]]
    assert list(transcript.media) == media

    generations = [call[2] for call in policy.calls if call[0] == "sampled"]
    last = generations[-1].finish_reason
    assert len(transcript.tokens) <= limits.max_tokens
    assert episode.turns == len(generations) <= limits.max_turns
    assert episode.reward == sum(environment.rewards)
    assert len(environment.rewards) == episode.turns - (last == "abort")
    assert (episode.end is EpisodeEnd.ABORTED) == (last == "abort")
    if last == "length":
        full = len(transcript.tokens) == limits.max_tokens
        assert episode.end is (EpisodeEnd.CONTEXT_FULL if full else EpisodeEnd.TRUNCATED)
    if episode.end is EpisodeEnd.MAX_TURNS:
        assert episode.turns == limits.max_turns
    return episode.end


async def play_many(seed):
    return await asyncio.gather(*(play_and_check(seed, index) for index in range(EPISODES_AN_EXAMPLE)))


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_random_episodes_line_up(seed):
    asyncio.run(play_many(seed))


@pytest.mark.slow
@settings(max_examples=800, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_twenty_thousand_random_episodes_line_up(seed):
    asyncio.run(play_many(seed))


def test_random_episodes_meet_every_end_they_can():
    ends = {end for seed in range(20) for end in asyncio.run(play_many(seed))}
    assert ends == set(EpisodeEnd) - {EpisodeEnd.TIME_LIMIT}
