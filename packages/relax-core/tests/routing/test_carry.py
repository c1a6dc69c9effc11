"""Routes on their way from an episode to a micro-batch: once a sample, in the smallest type, in place."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from agentic import Encoded, Generation, Transcript, TranscriptBuilder
from relax import schema
from relax.backends.routes import InvalidRoutes, Routing
from relax.distributed.bus import Bus, Endpoint
from relax.engine.episode_routes import routes_of
from relax.engine.micro_batches import groups_of, pack

SMALL, LARGE, FULL = Routing(8, 2, (0, 1, 2)), Routing(300, 2, (0, 1, 2)), Routing(256, 2, (0, 1, 2))


def _routes(routing: Routing, tokens: int, seed: int = 0) -> np.ndarray:
    scores = np.random.default_rng(seed).random((tokens, len(routing.layers), routing.experts))
    return np.argsort(scores, axis=-1)[..., : routing.top_k].astype(routing.dtype)


def _transcript(routing: Routing, turns: Sequence[int], observed: int = 0, seed: int = 0) -> Transcript:
    """A prompt of 3 tokens and turns of so many, each followed by 2 tokens that are shown; at the end
    `observed` more that nothing answers.
    """
    builder = TranscriptBuilder(Encoded(np.arange(3, dtype=np.int32)))
    for index, count in enumerate(turns):
        if index:
            builder.append_observation(Encoded(np.arange(2, dtype=np.int32)))
        routes = _routes(routing, len(builder) + count - 1, seed + index)
        tokens, logprobs = np.arange(count, dtype=np.int32), np.zeros(count, np.float32)
        builder.append_generation(Generation(tokens, logprobs, [(0, 0, count)], "stop", routes))
    if observed:
        builder.append_observation(Encoded(np.arange(observed, dtype=np.int32)))
    return builder.close()


async def _through_the_bus(
    endpoint: Endpoint, config: Any, samples: list[Any], **how: Any
) -> tuple[Any, list[np.ndarray]]:
    bus = await Bus.connect(endpoint, config, media=False)
    try:
        ids = await bus.put_group(samples, step=0)
        await bus.partition.update(ids, {"advantages": [np.zeros(len(s.loss_mask)) for s in samples]})
        batch = await bus.groups(schema.TASK_ACTOR, len(samples))
        stored = [row.copy() for row in batch[schema.ROUTES]]
        return pack(groups_of(batch), **how), stored
    finally:
        await bus.close()


def _samples(group: Callable[..., Any], transcripts: Sequence[Transcript], routing: Routing) -> list[Any]:
    return [
        replace(
            sample,
            tokens=transcript.tokens,
            prompt_length=transcript.prompt_length,
            loss_mask=transcript.loss_mask,
            rollout_logprobs=transcript.logprobs,
            policy_versions=transcript.versions,
            routes=routes,
        )
        for sample, transcript, routes in zip(
            group(0, members=len(transcripts)), transcripts, routes_of(transcripts, routing), strict=True
        )
    ]


@pytest.mark.parametrize(
    ("routing", "stored", "packed"),
    [(SMALL, "uint8", "int16"), (LARGE, "int16", "int16"), (FULL, "uint8", "int16")],
)
async def test_routes_come_out_of_the_bus_as_they_went_in(config, group, queue, routing, stored, packed):
    transcripts = [_transcript(routing, [4, 1]), _transcript(routing, [2], observed=5, seed=7)]

    batch, rows = await _through_the_bus(
        queue(), config("actor.routing_replay=true"), _samples(group, transcripts, routing)
    )

    offsets = batch.offsets.tolist()
    assert str(batch.routes.dtype) == f"torch.{packed}"
    assert batch.routes.shape == (offsets[-1], 3, 2)
    for start, end, transcript, row in zip(offsets, offsets[1:], transcripts, rows, strict=False):
        assert transcript.routes is not None
        fed = len(transcript.routes)
        assert row.dtype == stored
        assert row.nbytes == (len(transcript.tokens) - 1) * routing.bytes_per_token
        assert np.array_equal(batch.routes[start : start + fed].numpy(), transcript.routes)
        assert (batch.routes[start + fed : end] == -1).all()
    assert batch.routes[offsets[2] - 6 : offsets[2]].max() == -1  # the last token sampled, and what was shown


async def test_only_tokens_that_the_policy_sampled_are_replayed_when_so_configured(config, group, queue):
    transcript = _transcript(SMALL, [2, 3])

    batch, _ = await _through_the_bus(
        queue(),
        config("actor.routing_replay=true", "actor.routing_replay_tokens=sampled"),
        _samples(group, [transcript, transcript], SMALL),
        routes_of="sampled",
    )

    #          prompt   turn  shown   turn (its last token is never fed)
    sampled = [0, 0, 0, 1, 1, 0, 0, 1, 1, 0]
    assert transcript.routes is not None
    for place, is_sampled in enumerate(sampled * 2):
        expected = transcript.routes[place % 10].tolist() if is_sampled else [[-1, -1]] * 3
        assert batch.routes[place].tolist() == expected


async def test_without_routing_replay_no_routes_travel(config, group, queue):
    bus = await Bus.connect(queue(), config(), media=False)
    try:
        ids = await bus.put_group(group(0), step=0)
        await bus.partition.update(ids, {"advantages": [[0.0] * 5] * 2})
        batch = await bus.groups(schema.TASK_ACTOR, 2)
        assert schema.ROUTES not in batch
        assert pack(groups_of(batch)).routes is None
    finally:
        await bus.close()


def test_the_reference_is_not_given_routes():
    tasks = schema.tasks(reference=True, media=False, routes=True)

    assert schema.ROUTES in tasks[schema.TASK_ACTOR]
    assert schema.ROUTES not in tasks[schema.TASK_REFERENCE]
    assert schema.ROUTES not in tasks[schema.TASK_ADVANTAGES]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda r: None, "member 1: routes are NoneType"),
        (lambda r: r[:-2], r"member 1: routes have the shape \[5, 3, 2\]; 8 tokens"),
        (lambda r: r.astype(np.int32), "member 1: routes are int32"),
        (lambda r: r[:, :2], r"member 1: routes have the shape \[7, 2, 2\]"),
        (lambda r: np.full_like(r, 8), "member 1: token 0 goes to expert 8 in layer 0"),
        (lambda r: np.full_like(r, 3), r"member 1: token 0 goes to experts \[3, 3\] in layer 0"),
    ],
)
def test_a_group_with_a_member_of_bad_routes_is_refused_and_the_member_named(spoil, message):
    good, bad = _transcript(SMALL, [5]), _transcript(SMALL, [5])
    bad = Transcript(
        bad.tokens, bad.prompt_length, bad.loss_mask, bad.logprobs, bad.versions, routes=spoil(bad.routes)
    )

    with pytest.raises(InvalidRoutes, match=message):
        routes_of([good, bad], SMALL)
