"""What a server says of one request, piece by piece, and the generation it comes to.

A server streams: a piece has the tokens since the last one (or all of them, which a server without
`--incremental-streaming-output` repeats). One request may take several calls: it is asked again with what it
has when it was ended for a reason that is not its own.
"""

import base64
import binascii
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from agentic import Generation, GenerationRequest
from agentic.generation import FinishReason, VersionSpan

from relax.backends.inference.errors import EngineError
from relax.backends.inference.sglang.tensors import Shown
from relax.backends.routes import InvalidRoutes, Routing, narrowed

LOGPROB_MOST = 1e-3
"""No token is more likely than certain; what rounding adds to 0 is less than this."""


class BadAnswer(EngineError):
    """A server said something that is no answer to what it was asked."""


class WeightSpan(msgspec.Struct):
    """Tokens [start, end) of a call were sampled by this version."""

    version: str
    start: int
    end: int


class Finish(msgspec.Struct):
    """Why a call for a request ended: `stop`, `length` or `abort`; a status of 400 and more is a refusal."""

    type: str
    matched: Any = None
    message: str = ""
    status_code: int | None = None


class Meta(msgspec.Struct):
    """What is said beside the tokens. A logprob's entry is (logprob, token, text)."""

    finish_reason: Finish | None = None
    output_token_logprobs: list[tuple[float | None, int, Any]] = []
    output_token_logprobs_length: int = 0
    weight_version: str = ""
    weight_versions: list[WeightSpan] | None = None
    routed_experts: str | None = None


class Fault(msgspec.Struct):
    message: str = ""
    code: int = 500


class Piece(msgspec.Struct):
    """One message of a stream: about the request at `index` of the call, or a fault that ends the call."""

    meta_info: Meta | None = None
    index: int = 0
    prompt_token_ids: list[int] | None = None
    error: Fault | None = None


@dataclass(frozen=True)
class Captured:
    """What a server tells of routes.

    Attributes:
        routing: how the model routes.
        depth: decoder layers of the model: a server tells of all of them, of those too that do not route.
    """

    routing: Routing
    depth: int

    @property
    def none(self) -> np.ndarray:
        """Routes of no token."""
        return np.zeros((0, len(self.routing.layers), self.routing.top_k), self.routing.dtype)


@dataclass(eq=False)
class Answer:
    """One request on its way.

    Attributes:
        request: what is asked for.
        limit: most tokens that there is room for.
        captured: what the server tells of routes, when they are wanted.
        vocabulary: token ids are below it.
        faults: how often the server has answered it with an error of its own.
        rid: the name of the running call's request on the server.
        aborted: somebody has asked for its end.
        asked: the server has it.
        interrupted: its call is ended by us for a new version, after which it is asked again.
        pictures: its pictures as PNG files, once they are made.
        shown: what it shows as tensors, once they are packed.
        tokens, logprobs: all sampled so far.
        kept: tokens of the calls before this one.
        version: of the weights that the running call is asked of.
    """

    request: GenerationRequest
    limit: int
    captured: Captured | None = None
    vocabulary: int = 1 << 31
    faults: int = 0
    rid: str = ""
    aborted: bool = False
    asked: bool = False
    interrupted: bool = False
    pictures: list[bytes] | None = None
    shown: Shown | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    kept: int = 0
    version: int = -1
    _spans: list[VersionSpan] = field(default_factory=list)
    _routes: list[np.ndarray] = field(default_factory=list)
    _unread: bool = False
    _parts: int = 0
    _sure: int | None = None

    @property
    def shows(self) -> bool:
        """Whether a server is shown something with it."""
        return bool(self.pictures) or self.shown is not None

    @property
    def room(self) -> int:
        """Tokens that it may still have."""
        return self.limit - len(self.tokens)

    @property
    def prompt(self) -> list[int]:
        """What the next call is given: the request's tokens and all sampled so far."""
        return [*self.request.tokens.tolist(), *self.tokens]

    @property
    def routed(self) -> int:
        """Tokens whose routes are there from calls before."""
        return sum(len(part) for part in self._routes)

    def begin(self, rid: str, version: int) -> None:
        """It is asked for (again), of weights of that version."""
        self.rid, self.kept, self.asked, self.interrupted = rid, len(self.tokens), True, False
        self.version, self._sure, self._parts = version, None, len(self._routes)

    def hold(self, *, interrupted: bool) -> None:
        """Another version is put in: which one samples the tokens that come from now on, the end of the call
        will tell.
        """
        self.interrupted = interrupted
        if self._sure is None:
            self._sure = len(self.tokens)

    @property
    def other_versions(self) -> list[int]:
        """Those that have sampled in the call that ended last, but for the one it was asked of."""
        return [number for number, _, end in self._spans if end > self.kept and number != self.version]

    def forget(self) -> None:
        """Drop what the call that ended last has brought."""
        del self.tokens[self.kept :], self.logprobs[self.kept :], self._routes[self._parts :]
        self._spans = [
            (version, start, min(end, self.kept)) for version, start, end in self._spans if start < self.kept
        ]
        self._unread = False

    def take(self, meta: Meta) -> int:
        """Add what is new of the running call; returns how many tokens.

        Raises:
            BadAnswer: a gap, more tokens than were asked for, a token that there is not, a logprob that is
                none, or a version that is none of ours.
        """
        entries, total = meta.output_token_logprobs, meta.output_token_logprobs_length
        have = len(self.tokens) - self.kept
        first = total - len(entries)
        if first > have or first < 0:
            raise BadAnswer(
                f"request {self.request.id!r}: the server speaks of tokens {first} to {total} of its answer, "
                f"and {have} have come before"
            )
        new = entries[have - first :]
        if len(new) > self.room:
            raise BadAnswer(
                f"request {self.request.id!r}: the server has sampled {len(self.tokens) + len(new)} tokens, "
                f"and {self.limit} were asked for"
            )
        for logprob, token, _ in new:
            if not 0 <= token < self.vocabulary:
                raise BadAnswer(
                    f"request {self.request.id!r}: token {token} was sampled, and the vocabulary is 0 to "
                    f"{self.vocabulary - 1}: the server has another model"
                )
            if logprob is None or not np.isfinite(logprob) or logprob > LOGPROB_MOST:
                raise BadAnswer(
                    f"request {self.request.id!r}: token {token} was sampled with the logprob {logprob}: the "
                    f"model computes values that are no numbers"
                )
            self.tokens.append(token)
            self.logprobs.append(float(logprob))
        if meta.finish_reason is not None:
            self._close(meta)
        return len(new)

    def _close(self, meta: Meta) -> None:
        """The call has ended: where its versions lie, and its routes."""
        end = len(self.tokens)
        spans = meta.weight_versions or [WeightSpan(meta.weight_version, 0, end - self.kept)]
        for span in spans:
            self._add_span(self._number(span.version), min(self.kept + span.end, end))
        if self._spans and self._spans[-1][2] < end:  # an abort tells of fewer tokens than have come
            self._add_span(self._spans[-1][0], end)
        if self.captured is not None and end > self.kept:
            self._take_routes(meta.routed_experts)

    def _add_span(self, version: int, end: int) -> None:
        start = self._spans[-1][2] if self._spans else 0
        if end <= start:
            return
        if self._spans and self._spans[-1][0] == version:
            self._spans[-1] = (version, self._spans[-1][1], end)
        else:
            self._spans.append((version, start, end))

    def _number(self, version: str) -> int:
        try:
            return int(version)
        except ValueError:
            raise BadAnswer(
                f"request {self.request.id!r}: the server speaks of the weights {version!r}, which no "
                f"version of this run is called; somebody else has changed its weights"
            ) from None

    def _take_routes(self, encoded: str | None) -> None:
        """Add the routes of the running call: those of the tokens whose routes are not there yet."""
        assert self.captured is not None
        wanted = len(self.request.tokens) + len(self.tokens) - 1 - self.routed
        found = read_routes(encoded, self.captured)
        if found is None or len(found) != wanted:
            self._unread = True
        else:
            self._routes.append(found)

    @property
    def routes(self) -> np.ndarray | None:
        """[tokens - 1, layers, top_k] of all that has ended; no rows at all where a server's cannot be read,
        which no sample passes with; None where none are wanted, or there are no tokens.
        """
        if self.captured is None or not self.tokens:
            return None
        if self._unread or not self._routes:
            return self.captured.none
        return self._routes[0] if len(self._routes) == 1 else np.concatenate(self._routes)

    def generation(self, reason: FinishReason) -> Generation:
        """All of it, once the running call has ended."""
        return Generation(
            np.array(self.tokens, np.int32),
            np.array(self.logprobs, np.float32),
            list(self._spans),
            reason,
            self.routes,
        )

    def partial(self) -> Generation | None:
        """What can be gone on with elsewhere when the server is lost in the middle of a call; None when that
        is nothing. Routes come with the end of a call, so with them it is what the calls before brought.
        """
        sure = len(self.tokens) if self._sure is None else self._sure
        end = self.kept if self.captured is not None else sure
        if not end or self._unread:
            return None
        spans = [span for span in self._spans if span[2] <= self.kept]
        if self.kept < end:
            if spans and spans[-1][0] == self.version:
                spans[-1] = (self.version, spans[-1][1], end)
            else:
                spans.append((self.version, self.kept, end))
        return Generation(
            np.array(self.tokens[:end], np.int32),
            np.array(self.logprobs[:end], np.float32),
            spans,
            "abort",
            self.routes,
        )


def read_routes(encoded: str | None, captured: Captured) -> np.ndarray | None:
    """[tokens, layers, top_k] from what a server says: base64 of little-endian int32 [tokens, every layer of
    the model, top_k]; None for what is no such thing. Numbers that are no experts stay as they are, for the
    check of samples to refuse by name.
    """
    if encoded is None:
        return None
    try:
        flat = np.frombuffer(base64.b64decode(encoded, validate=True), "<i4")
    except (binascii.Error, ValueError):
        return None
    routing = captured.routing
    if flat.size % (captured.depth * routing.top_k):
        return None
    experts = flat.reshape(-1, captured.depth, routing.top_k)[:, list(routing.layers)]
    try:
        return narrowed(experts, routing)
    except InvalidRoutes:
        return experts.astype(np.int32)
