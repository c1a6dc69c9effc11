"""What outlives an engine: how a loss is told from other faults, and how an answer goes on elsewhere.

Pure functions and small state machines; the pool and the launchers act on them. There is no time in here but
what the callers say.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec
import numpy as np
from agentic import Generation, GenerationRequest, derive_seed

from relax.backends.inference.base import Health
from relax.backends.inference.errors import EngineClosed, EngineFailed, EngineLost

LOSSES = (EngineLost, EngineFailed, EngineClosed)
"""What an engine raises when it is gone. Any other error is about a request or a version, not the engine."""

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
"""Seconds before the first start again; each further one waits twice as long, up to the longest."""

STEADY_SECONDS = 600.0
"""An engine that has served for so long since it was started is forgiven its earlier losses."""


class NoReplicaLeft(RuntimeError):
    """Every engine is lost and none is started again."""

    def __init__(self, given_up: Mapping[str, str]) -> None:
        super().__init__(given_up)
        self.given_up = given_up

    def __str__(self) -> str:
        how = "; ".join(f"{name}: {reason}" for name, reason in sorted(self.given_up.items()))
        return (
            f"no engine is left, and none is started again: {how}. Raise rollout.engine_restarts if engines "
            f"are expected to die"
        )


def as_lost(name: str, error: BaseException) -> EngineLost | None:
    """The loss of engine `name` that an error tells of; None when it tells of none."""
    if isinstance(error, EngineLost):
        return error
    if isinstance(error, LOSSES):
        lost = EngineLost(name, str(error))
        lost.__cause__ = error
        return lost
    return None


@dataclass
class RestartBudget:
    """How often an engine may be started again, in a row: one that then serves for `STEADY_SECONDS` begins
    anew.
    """

    limit: int
    used: int = 0

    def pause(self, served_seconds: float) -> float | None:
        """The engine is lost after it served for so long. Seconds to wait before it is started again; None
        when its restarts are used up.
        """
        if served_seconds >= STEADY_SECONDS:
            self.used = 0
        if self.used >= self.limit:
            return None
        self.used += 1
        return min(FIRST_PAUSE * 2 ** (self.used - 1), LONGEST_PAUSE)


@dataclass
class ProgressWatch:
    """Tells an engine that works from one that only answers."""

    _seen: tuple[int, int, int] = (-1, -1, -1)
    _since: float | None = field(default=None)

    def idle_seconds(self, health: Health, open_requests: int, now: float) -> float:
        """For how long it has had requests and neither decoded nor committed; 0 when it has none.

        Args:
            health: what it says now.
            open_requests: requests it was asked for and has not answered, whatever it says itself.
            now: seconds, on a clock that only grows.
        """
        seen = (health.decode_steps, health.generated_tokens, health.version)
        if self._since is None or seen != self._seen or not (open_requests or health.running):
            self._seen, self._since = seen, now
        return now - self._since


def resumed(request: GenerationRequest, kept: Generation) -> GenerationRequest:
    """What is left to ask for when the tokens of `kept` are there: the same id, prompt and tokens so far as
    the prompt, and as many new tokens less.

    The seed is derived from the request's and the number of tokens kept: draws are a function of the seed and
    of the position in what is asked for, and those of the first positions are used up.
    """
    return GenerationRequest(
        id=request.id,
        tokens=np.concatenate([request.tokens, kept.tokens]),
        sampling=msgspec.structs.replace(
            request.sampling, max_new_tokens=request.sampling.max_new_tokens - len(kept.tokens)
        ),
        seed=derive_seed(request.seed, len(kept.tokens)),
        media=request.media,
    )


def joined(prompt: int, kept: Generation | None, rest: Generation) -> Generation:
    """One answer of what was kept and what came after it; ends as `rest` did.

    Args:
        prompt: tokens of the request's prompt.
        kept: the first part; None when there is none.
        rest: sampled for `resumed(request, kept)`; its routes are of the whole text.
    """
    if kept is None:
        return rest
    count = len(kept.tokens)
    spans = [*kept.spans]
    for version, start, end in rest.spans:
        if spans and spans[-1][0] == version:
            spans[-1] = (version, spans[-1][1], end + count)
        else:
            spans.append((version, start + count, end + count))
    return Generation(
        tokens=np.concatenate([kept.tokens, rest.tokens]),
        logprobs=np.concatenate([kept.logprobs, rest.logprobs]),
        spans=spans,
        finish_reason=rest.finish_reason,
        routes=_joined_routes(prompt, kept, rest),
    )


def ended(request: GenerationRequest, kept: Generation) -> Generation | None:
    """The answer, when what was kept is all of it: it ends with a stop token or has no room."""
    if len(kept.tokens) and int(kept.tokens[-1]) in request.sampling.stop_token_ids:
        return msgspec.structs.replace(kept, finish_reason="stop")
    if len(kept.tokens) >= request.sampling.max_new_tokens:
        return msgspec.structs.replace(kept, finish_reason="length")
    return None


def aborted(kept: Generation | None) -> Generation:
    """The answer to a request that was given up while no engine had it."""
    if kept is not None:
        return msgspec.structs.replace(kept, finish_reason="abort")
    return Generation(np.zeros(0, np.int32), np.zeros(0, np.float32), [], "abort")


def _joined_routes(prompt: int, kept: Generation, rest: Generation) -> np.ndarray | None:
    """The routes of the engine that saw a token first, then those of the other one."""
    if not len(rest.tokens):
        return kept.routes
    if kept.routes is None or rest.routes is None:
        return None
    return np.concatenate([kept.routes, rest.routes[prompt + len(kept.tokens) - 1 :]])
