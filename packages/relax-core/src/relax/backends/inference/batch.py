"""The running rows: what each was asked, what it has so far, and the steps that move them on together.

State that a step touches is one array over the rows, so that a step costs a few vector operations whatever
the number of rows; Python looks at single rows only when they come and go.
"""

from collections.abc import Sequence

import numpy as np
from agentic import FinishReason, Generation, GenerationRequest
from numpy.typing import NDArray
from torch import Tensor

from relax.backends.inference.base import FinishedGeneration
from relax.backends.inference.captured import CapturedRoutes
from relax.backends.inference.contexts import Context
from relax.backends.inference.errors import EngineError
from relax.backends.inference.network import Network
from relax.backends.inference.sampling import draw, uniforms

_NO_TOKEN = -1


class RunningBatch:
    """At most `slots` requests in flight; row i of each array and slot i of the KV are `requests[i]`'s."""

    def __init__(self, network: Network, slots: int, version: int) -> None:
        self._network = network
        self.slots = slots
        self.version = version
        self.requests: list[GenerationRequest] = []
        self._spans: list[list[tuple[int, int, int]]] = []
        self._routes: CapturedRoutes | None = None
        if network.routing is not None:
            self._routes = CapturedRoutes(network.routing, slots)
        self._seeds = np.zeros(slots, np.uint64)
        self._temperature = np.zeros(slots, np.float32)
        self._top_p = np.zeros(slots, np.float32)
        self._top_k = np.zeros(slots, np.int64)
        self._stops = np.full((slots, 1), _NO_TOKEN, np.int64)
        self._limits = np.zeros(slots, np.int64)
        self._offsets = np.zeros(slots, np.float64)
        self._lengths = np.zeros(
            slots, np.int64
        )  # tokens whose KV is in the slot: all but the last sampled one
        self._counts = np.zeros(slots, np.int64)  # tokens sampled
        self._last = np.zeros(slots, np.int64)
        self._tokens = np.zeros((slots, 64), np.int32)
        self._logprobs = np.zeros((slots, 64), np.float32)

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def free(self) -> int:
        return self.slots - len(self.requests)

    def admit(self, requests: Sequence[GenerationRequest]) -> list[FinishedGeneration]:
        """Prefill and sample each one's first token, equal prompts once. Returns those it finished."""
        start = len(self.requests)
        rows = slice(start, start + len(requests))
        contexts: dict[bytes, Context] = {}
        slots: dict[bytes, list[int]] = {}
        for row, request in enumerate(requests, start):
            context = Context.of(request.tokens, request.media)
            contexts.setdefault(key := context.key, context)
            slots.setdefault(key, []).append(row)
            self._enter(row, request)
        found = self._network.prefill(list(contexts.values()), list(slots.values()))
        source = np.empty(len(requests), np.int64)
        for index, members in enumerate(slots.values()):
            source[np.asarray(members) - start] = index
            self._offsets[members] = found.offsets[index]
        if self._routes is not None:
            self._routes.enter([found.routes[index] for index in source.tolist()])
        return self._sample(rows, found.logits[source.tolist()])

    def step(self) -> list[FinishedGeneration]:
        """One decode step of every row. Returns what it finished."""
        rows = slice(0, len(self.requests))
        into = None if self._routes is None else self._routes.step()
        logits = self._network.decode(self._last[rows], self._lengths[rows], self._offsets[rows], into)
        self._lengths[rows] += 1
        return self._sample(rows, logits)

    def abort(self, request_id: str) -> FinishedGeneration | None:
        """End a row with what it has; None if no row has that id."""
        for row, request in enumerate(self.requests):
            if request.id == request_id:
                finished = self._finish(row, "abort")
                self._remove([row])
                return finished
        return None

    def commit(self, version: int) -> int:
        """From here on tokens are of `version`, whose weights the network has: recompute every row's KV.

        Routes stay those of the first time: the recomputation follows them and captures none.

        Returns:
            The number of rows recomputed.
        """
        contexts: list[Context] = []
        for row, request in enumerate(self.requests):
            self._close_span(row)
            # The last sampled token is not in the slot yet: the next step feeds it.
            sampled = self._tokens[row, : self._counts[row] - 1]
            contexts.append(Context.of(np.concatenate([request.tokens, sampled]), request.media))
        self.version = version
        if contexts:
            routes = [self._routes.of(row) for row in range(len(contexts))] if self._routes else []
            self._network.recompute(contexts, [[row] for row in range(len(contexts))], routes)
        return len(contexts)

    def _enter(self, row: int, request: GenerationRequest) -> None:
        sampling = request.sampling
        self.requests.append(request)
        self._spans.append([])
        self._seeds[row] = request.seed
        self._temperature[row] = sampling.temperature
        self._top_p[row] = sampling.top_p
        self._top_k[row] = sampling.top_k
        self._limits[row] = min(sampling.max_new_tokens, self._network.capacity - len(request.tokens))
        self._lengths[row] = len(request.tokens)
        self._counts[row] = 0
        stops = sorted(set(sampling.stop_token_ids))
        if len(stops) > self._stops.shape[1]:
            self._stops = _widen(self._stops, len(stops), _NO_TOKEN)
        self._stops[row] = _NO_TOKEN
        self._stops[row, : len(stops)] = stops

    def _sample(self, rows: slice, logits: Tensor) -> list[FinishedGeneration]:
        counts = self._counts[rows]
        drawn = draw(
            logits,
            uniforms(self._seeds[rows], counts),
            self._temperature[rows],
            self._top_p[rows],
            self._top_k[rows],
            never=self._network.placeholders,
        )
        if not np.isfinite(drawn.logprobs).all():
            row = rows.start + int(np.flatnonzero(~np.isfinite(drawn.logprobs))[0])
            raise EngineError(
                f"request {self.requests[row].id!r} got logprob {drawn.logprobs[row - rows.start]} at token "
                f"{self._counts[row]}: the weights of version {self.version} do not give finite logits; has "
                "training diverged?"
            )
        most = int(counts.max())
        if most >= self._tokens.shape[1]:
            self._tokens = _widen(self._tokens, 2 * most, 0)
            self._logprobs = _widen(self._logprobs, 2 * most, 0)
        index = np.arange(rows.start, rows.stop)
        self._tokens[index, counts] = drawn.tokens
        self._logprobs[index, counts] = drawn.logprobs
        self._last[rows] = drawn.tokens
        self._counts[rows] += 1
        stopped = (drawn.tokens[:, None] == self._stops[rows]).any(axis=1)
        done = index[stopped | (self._counts[rows] >= self._limits[rows])]
        if not len(done):
            return []
        finished = [
            self._finish(row, "stop" if stopped[row - rows.start] else "length") for row in done.tolist()
        ]
        self._remove(done.tolist())
        return finished

    def _close_span(self, row: int) -> None:
        spans, count = self._spans[row], int(self._counts[row])
        start = spans[-1][2] if spans else 0
        if count > start:
            spans.append((self.version, start, count))

    def _finish(self, row: int, reason: FinishReason) -> FinishedGeneration:
        self._close_span(row)
        count = int(self._counts[row])
        generation = Generation(
            tokens=self._tokens[row, :count].copy(),
            logprobs=self._logprobs[row, :count].copy(),
            spans=self._spans[row],
            finish_reason=reason,
            routes=None if self._routes is None else self._routes.of(row),
        )
        return FinishedGeneration(self.requests[row].id, generation)

    def _remove(self, rows: Sequence[int]) -> None:
        """Take rows out and close the holes with the last ones."""
        left = len(self.requests) - len(rows)
        gone = set(rows)
        holes = [row for row in rows if row < left]
        movers = [row for row in range(left, len(self.requests)) if row not in gone]
        if movers:
            for state in (
                self._seeds,
                self._temperature,
                self._top_p,
                self._top_k,
                self._stops,
                self._limits,
                self._offsets,
                self._lengths,
                self._counts,
                self._last,
                self._tokens,
                self._logprobs,
            ):
                state[holes] = state[movers]
            for source, target in zip(movers, holes, strict=True):
                self.requests[target] = self.requests[source]
                self._spans[target] = self._spans[source]
            self._network.move(movers, holes)
            if self._routes is not None:
                self._routes.move(movers, holes)
        if self._routes is not None:
            self._routes.keep(left)
        del self.requests[left:]
        del self._spans[left:]
        if not left:
            self._network.drop_cache()


def _widen(array: NDArray, columns: int, value: int) -> NDArray:
    """More columns on the right, filled with `value`."""
    wider = np.full((array.shape[0], columns), value, array.dtype)
    wider[:, : array.shape[1]] = array
    return wider
