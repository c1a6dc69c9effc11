"""The routes of finished episodes, as they go on the bus: checked where they enter, before any training.

An engine's word is not taken for it. A sample that was trained along routes which are not its own would be
trained on another policy's distribution, and nobody would see it.
"""

from collections.abc import Sequence

import numpy as np
from agentic import Transcript

from relax.backends.routes import InvalidRoutes, Routes, Routing, check, check_experts, unrouted


def routes_of(transcripts: Sequence[Transcript], routing: Routing) -> list[Routes]:
    """For each member of a group its routes, [tokens - 1, layers, top_k], in the type they travel in.

    Tokens behind the last one that was sampled (an observation that nothing answered) were never fed; they
    are marked as without a route, which changes no logprob that is trained.

    Raises:
        InvalidRoutes: a member has none, or such as cannot be its own. A group is judged as a whole.
    """
    found: list[Routes] = []
    for member, transcript in enumerate(transcripts):
        fed = transcript.prompt_length + int(np.flatnonzero(transcript.loss_mask)[-1])
        routes = transcript.routes
        if routes is None or (len(routes), routes.dtype, routes.shape[1:]) != (
            fed,
            routing.dtype,
            (len(routing.layers), routing.top_k),
        ):
            _judge(member, routes, routing, fed + 1)
        assert routes is not None
        if missing := len(transcript.tokens) - 1 - fed:
            marks = np.full((missing, *routes.shape[1:]), unrouted(routing.dtype), routing.dtype)
            routes = np.concatenate([routes, marks])
        found.append(routes)
    try:
        check_experts(np.concatenate(found), routing)  # all at once: nearly always they are right
    except InvalidRoutes:
        for member, routes in enumerate(found):
            _judge(member, routes, routing, len(routes) + 1)
        raise
    return found


def _judge(member: int, routes: object, routing: Routing, tokens: int) -> None:
    try:
        check(routes, routing, tokens)
    except InvalidRoutes as error:
        raise InvalidRoutes(f"member {member}: {error}") from error
