"""Tokens that cross between episodes and engines: what is asked for, and what was sampled.

Everything here is frozen and checks its own rules when made, so a malformed answer is refused where it
enters. Arrays are held, not copied.
"""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from .errors import InvalidValue

type MediaItem = Any
"""One image, audio or video as the policy's processor made it: carried in order, never looked into."""

type VersionSpan = tuple[int, int, int]
"""(version, start, end): the tokens [start, end) were sampled by policy version `version`."""

type FinishReason = Literal["stop", "length", "abort"]

FINISH_REASONS = ("stop", "length", "abort")

ROUTE_DTYPES = (np.uint8, np.int16, np.int32)


class Sampling(msgspec.Struct, frozen=True):
    """How the next tokens are drawn.

    Attributes:
        temperature: the logits are divided by it; 0 is greedy.
        top_p: keep the smallest set of tokens whose probability reaches it; 1.0 is off. In (0, 1].
        top_k: keep the k most probable tokens; 0 is off.
        max_new_tokens: at most this many tokens are sampled, >= 1.
        stop_token_ids: sampling any of them ends the generation with "stop"; the stop token is part of the
            answer.

    Raises:
        InvalidValue: a value outside its range.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int = 512
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not (0.0 <= self.temperature < float("inf")):
            raise InvalidValue(
                f"temperature is {self.temperature}; expected a finite number >= 0 (0 is greedy)"
            )
        if not (0.0 < self.top_p <= 1.0):
            raise InvalidValue(f"top_p is {self.top_p}; expected a number in (0, 1] (1.0 is off)")
        if self.top_k < 0:
            raise InvalidValue(f"top_k is {self.top_k}; expected an integer >= 0 (0 is off)")
        if self.max_new_tokens < 1:
            raise InvalidValue(f"max_new_tokens is {self.max_new_tokens}; expected an integer >= 1")
        if any(token < 0 for token in self.stop_token_ids):
            raise InvalidValue(f"stop_token_ids is {self.stop_token_ids}; expected token ids >= 0")


class Encoded(msgspec.Struct, frozen=True, eq=False):
    """Messages as the policy's tokenizer and processor see them.

    Attributes:
        tokens: int32 [k], k >= 0, with every placeholder of the media expanded.
        media: what the placeholders stand for, in order of appearance.

    Raises:
        InvalidValue: tokens of another kind.
    """

    tokens: npt.NDArray[np.int32]
    media: list[MediaItem] = msgspec.field(default_factory=list)

    def __post_init__(self) -> None:
        check_vector("the encoded tokens", self.tokens, np.int32)


class GenerationRequest(msgspec.Struct, frozen=True, eq=False):
    """One call for tokens.

    Attributes:
        id: unique among the requests in flight; it is what `abort` takes.
        tokens: int32 [k], k >= 1, the ids the engine conditions on, exactly.
        sampling: how to draw.
        seed: 0 <= seed < 2**64. The draw at position i of the answer is a function of (seed, i) and the
            logits only.
        media: what the tokens' placeholders stand for, in order of appearance.

    Raises:
        InvalidValue: tokens of another kind or none at all, a seed out of range, an empty id.
    """

    id: str
    tokens: npt.NDArray[np.int32]
    sampling: Sampling
    seed: int
    media: list[MediaItem] = msgspec.field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.id:
            raise InvalidValue("the id of a generation request is empty; expected a unique name")
        check_vector(f"the tokens of generation request {self.id!r}", self.tokens, np.int32)
        if len(self.tokens) == 0:
            raise InvalidValue(
                f"generation request {self.id!r} has no tokens; expected a prompt of at least one token"
            )
        check_seed(self.seed)


class Generation(msgspec.Struct, frozen=True, eq=False):
    """The tokens an engine sampled for one request.

    Attributes:
        tokens: int32 [m], exactly the ids sampled, a stop token included. m >= 1, or m >= 0 after an abort.
        logprobs: float32 [m], finite: log p of each token under the distribution it was drawn from.
        spans: the policy versions that sampled them: (version, start, end) with version >= 0 and start < end,
            contiguous, the first starting at 0, the last ending at m; empty when m is 0.
        finish_reason: "stop" (the last token is a stop token), "length" (no room for more), or "abort".
        routes: uint8, int16 or int32 [k + m - 1, layers, top_k] for a request of k tokens: the experts that
            every token but the last was sent to, in the policy that saw it first; None where the engine
            tells none. Their number is not checked here, as a generation does not know its request.

    Raises:
        InvalidValue: any of these does not hold.
    """

    tokens: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    spans: list[VersionSpan]
    finish_reason: FinishReason
    routes: npt.NDArray[Any] | None = None

    def __post_init__(self) -> None:
        check_vector("the tokens of a generation", self.tokens, np.int32)
        check_vector("the logprobs of a generation", self.logprobs, np.float32)
        count = len(self.tokens)
        if len(self.logprobs) != count:
            raise InvalidValue(
                f"a generation has {count} tokens and {len(self.logprobs)} logprobs; expected one a token"
            )
        finite = np.isfinite(self.logprobs)
        if not finite.all():
            at = int(np.argmin(finite))
            raise InvalidValue(
                f"logprob {at} of a generation is {self.logprobs[at]}; expected a finite number, as a token "
                "that was sampled has a probability above 0"
            )
        if self.finish_reason not in FINISH_REASONS:
            raise InvalidValue(f"finish_reason is {self.finish_reason!r}; expected one of {FINISH_REASONS}")
        if count == 0 and self.finish_reason != "abort":
            raise InvalidValue(
                f"a generation has no tokens but finish_reason {self.finish_reason!r}; expected one token at "
                "least, as only an abort may be empty"
            )
        check_spans(self.spans, count)
        if self.routes is not None:
            check_routes("a generation", self.routes)


def check_vector(name: str, array: object, dtype: type[np.generic]) -> None:
    """Raise `InvalidValue` unless `array` is a one-dimensional numpy array of exactly `dtype`."""
    if isinstance(array, np.ndarray):
        if array.ndim == 1 and array.dtype == dtype:
            return
        found = f"a numpy array of {array.dtype} with shape {array.shape}"
    else:
        found = type(array).__name__
    expected = f"a one-dimensional numpy array of {np.dtype(dtype).name}"
    raise InvalidValue(f"{name}: found {found}; expected {expected}")


def check_seed(seed: int) -> None:
    """Raise `InvalidValue` unless 0 <= seed < 2**64."""
    if not (0 <= seed < 2**64):
        raise InvalidValue(f"the seed is {seed}; expected 0 <= seed < 2**64 (derive_seed makes such seeds)")


def check_spans(spans: Sequence[VersionSpan], count: int) -> None:
    """Raise `InvalidValue` unless the spans cover [0, count) without gap or overlap."""
    position = 0
    for version, start, end in spans:
        if start != position or end <= start or version < 0:
            raise InvalidValue(
                f"version span ({version}, {start}, {end}) comes at position {position}; expected "
                f"(version >= 0, {position}, end > {position}): spans are contiguous and cover all tokens"
            )
        position = end
    if position != count:
        raise InvalidValue(f"the version spans end at {position}; expected {count}, the number of tokens")


def check_routes(whose: str, routes: object) -> None:
    """Raise `InvalidValue` unless `routes` is a numpy array of a route's kind: uint8, int16 or int32 [tokens,
    layers, top_k].
    """
    if not isinstance(routes, np.ndarray) or routes.ndim != 3 or routes.dtype not in ROUTE_DTYPES:
        found = (
            f"a numpy array of {routes.dtype} with shape {routes.shape}"
            if isinstance(routes, np.ndarray)
            else type(routes).__name__
        )
        raise InvalidValue(
            f"the routes of {whose}: found {found}; expected a numpy array of uint8, int16 or int32 with "
            "the shape (tokens, layers, top_k)"
        )
