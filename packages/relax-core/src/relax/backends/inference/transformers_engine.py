"""The `transformers` engine: continuous batching over a Hugging Face model, in a thread of its own."""

import asyncio
import threading
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from agentic import Generation, GenerationRequest
from torch import Tensor

from relax.backends.inference.base import EngineSpec, FinishedGeneration, Health, UpdateReport
from relax.backends.inference.batch import RunningBatch
from relax.backends.inference.errors import (
    EngineClosed,
    EngineError,
    EngineFailed,
    EngineTimeout,
    InvalidRequest,
    InvalidUpdate,
    NotReady,
)
from relax.backends.inference.log import EngineLog
from relax.backends.inference.network import Network
from relax.backends.inference.schedule import (
    Abort,
    Action,
    Admit,
    Commit,
    Decode,
    Inbox,
    LiveSchedule,
    ReplaySchedule,
    StagedVersion,
)
from relax.backends.inference.streams import GenerationStream, Waiter
from relax.ops.leavable import leavable

NO_WEIGHTS = -1
"""The version of an engine that has committed none."""

_CLOSE_SECONDS = 120.0
"""A step or prefill that is under way is let finish; it takes no longer than this."""


class TransformersEngine:
    """An `InferenceEngine` over a Hugging Face causal language model, Qwen3-VL (images, video) or a
    Qwen3-Omni thinker (images, video, sound).

    Requests join and leave between decode steps; the rows in flight decode together, each at its own length.
    Equal prompts of one admission are prefilled once. Logprobs are of the temperature-scaled distribution
    over the whole vocabulary (temperature 0 is greedy, with logprobs at temperature 1; top_p and top_k
    restrict what is sampled, not the logprob). The uniform behind a token is a function of the request's seed
    and the token's position alone, so the same calls in the same order give the same bits.

    Args:
        folder: the model, in Hugging Face layout.
        version: the version that the folder's weights (or the seed's) are. None: the engine has no weights
            until the first commit, and refuses requests until then.
        weights: False draws the weights from `seed` though the folder has some.
        seed: see `relax.backends.models.build_model`.
        dtype: of weights, activations and KV.
        device: a torch device.
        max_running: requests that decode together; more wait, first come first served.
        capacity_tokens: the longest prompt and response together; None is the model's context.
        torch_threads: threads of one operation.
        capture_routes: tell with every generation which experts its tokens were sent to; of Qwen3's mixtures
            of experts, those that see and hear among them.
        log: where decisions are recorded, if anywhere.
        replay: events of a log to follow to the letter; after the last one the engine goes on live.

    Raises:
        relax.backends.models.ModelFolderError: the folder cannot be read.
        EngineError: the model or an argument is not served here.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        version: int | None = None,
        weights: bool = True,
        seed: int = 0,
        dtype: str = "float32",
        device: str = "cpu",
        max_running: int = 64,
        capacity_tokens: int | None = None,
        torch_threads: int = 1,
        capture_routes: bool = False,
        log: EngineLog | None = None,
        replay: Iterable[Sequence[Any]] = (),
    ) -> None:
        if max_running < 1:
            raise EngineError(f"max_running is {max_running}; expected at least 1")
        if version is not None and version < 0:
            raise EngineError(f"version is {version}; expected a version >= 0, or None for none")
        self._network = Network(
            folder,
            dtype=dtype,
            device=device,
            slots=max_running,
            capacity=capacity_tokens,
            weights=weights and version is not None,
            seed=seed,
            capture=capture_routes,
        )
        self._batch = RunningBatch(self._network, max_running, NO_WEIGHTS if version is None else version)
        self._schedule = ReplaySchedule(replay) if (replay := list(replay)) else LiveSchedule()
        self._log = log
        self._torch_threads = torch_threads

        # Guarded by the lock; the compute thread owns everything else.
        self._lock = threading.Lock()
        self._arrival = threading.Condition(self._lock)
        self._inbox = Inbox()
        self._streams: dict[str, GenerationStream] = {}
        self._committing: Waiter[UpdateReport] | None = None
        self._awaiting: list[tuple[int, Waiter[int]]] = []
        self._version = self._batch.version
        self._running = 0
        self._decode_steps = 0
        self._generated_tokens = 0
        self._busy_seconds = 0.0
        self._closing = False
        self._end: EngineError | None = None

        self._thread = threading.Thread(target=self._compute, name="relax-engine", daemon=True)
        self._thread.start()

    @classmethod
    async def create(cls, spec: EngineSpec) -> Self:
        """An engine of a run; see `InferenceEngine.create`. Raises as the class does."""
        return await leavable(
            lambda: cls(
                spec.folder,
                dtype=spec.dtype,
                device=spec.settings.device,
                max_running=spec.max_running,
                capacity_tokens=spec.capacity_tokens,
                capture_routes=spec.routes,
                log=spec.log,
                replay=spec.replay,
            )
        )

    def generate(self, requests: Sequence[GenerationRequest]) -> GenerationStream:
        """Ask for generations; the requests are queued, together and in order, before this returns.

        Returns:
            An async iterator over `FinishedGeneration`. Left early (`aclose`, or its reader cancelled), it
            aborts the rest.

        Raises:
            InvalidRequest: a request that can never be served, or an id already in flight; none of the call
                is queued.
            NotReady: no weights yet.
            EngineClosed, EngineFailed: the engine has ended.
        """
        requests = list(requests)
        for request in requests:
            self._network.check(request)
        stream = GenerationStream([request.id for request in requests], self._give_up)
        with self._arrival:
            self._check_open()
            if self._version == NO_WEIGHTS:
                raise NotReady(
                    "the engine has no weights yet; commit a version first (wait_version tells when that "
                    "is done)"
                )
            taken = set(self._streams)
            for request in requests:
                if request.id in taken:
                    raise InvalidRequest(
                        f"request id {request.id!r} is already in flight; ids must be unique"
                    )
                taken.add(request.id)
            for request in requests:
                self._inbox.waiting[request.id] = request
                self._streams[request.id] = stream
            self._arrival.notify()
        return stream

    async def abort(self, request_id: str) -> None:
        """End a request before the next step, with what it has, as `abort`. An unknown id is ignored."""
        self._give_up([request_id])

    def weights(self) -> dict[str, Tensor]:
        """The weights by Hugging Face name: what a version has to look like. A commit changes them."""
        return dict(self._network.layout)

    async def begin_update(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Take a version's complete weights, to be committed; one begun and not committed is forgotten.

        Nothing is copied yet: the tensors must stay as they are until `commit_update` has returned.

        Raises:
            InvalidUpdate: a name, shape or dtype that does not fit the model, or a version not above the
                served one.
            EngineClosed, EngineFailed: the engine has ended.
        """
        self._network.check_weights(version, tensors)
        with self._arrival:
            self._check_open()
            if version <= self._version:
                raise InvalidUpdate(
                    f"version {version} was begun, but version {self._version} is served; versions only rise"
                )
            self._inbox.staged = StagedVersion(version, dict(tensors))

    async def commit_update(self, version: int) -> UpdateReport:
        """Copy the begun version in between two decode steps; the KV of all that runs is recomputed.

        Raises:
            InvalidUpdate: the version was not begun, or another commit is under way.
            ReplayMismatch: the log that is replayed has no such version.
            EngineClosed, EngineFailed: the engine has ended, or ended meanwhile.
        """
        waiter = Waiter[UpdateReport]()
        with self._arrival:
            self._check_open()
            staged = self._inbox.staged
            if staged is None or staged.version != version:
                begun = "none" if staged is None else f"version {staged.version}"
                raise InvalidUpdate(
                    f"version {version} is to be committed, but {begun} was begun; call begin_update "
                    f"before commit_update"
                )
            if self._committing is not None:
                raise InvalidUpdate(f"version {version} is to be committed while another commit is under way")
            self._schedule.check_commit(version)
            self._inbox.commit, self._inbox.staged = staged, None
            self._committing = waiter
            self._arrival.notify()
        return await waiter.future

    async def wait_version(self, version: int, timeout: float) -> int:
        """Wait until a version at or above `version` is committed, and return the one that is.

        Args:
            version: the lowest that will do.
            timeout: seconds.

        Raises:
            EngineTimeout: it was not committed in time.
            EngineClosed, EngineFailed: the engine has ended, or ended meanwhile.
        """
        waiter = Waiter[int]()
        with self._arrival:
            self._check_open()
            if self._version >= version:
                return self._version
            entry = (version, waiter)
            self._awaiting.append(entry)
        try:
            async with asyncio.timeout(timeout):
                return await waiter.future
        except TimeoutError:
            raise EngineTimeout(
                f"version {version} was not committed within {timeout} s; the engine serves version "
                f"{self._version}"
            ) from None
        finally:
            with self._arrival:
                if entry in self._awaiting:
                    self._awaiting.remove(entry)

    async def health(self) -> Health:
        """How the engine is; answers also after it has failed or closed (`alive` is then False)."""
        with self._arrival:
            return Health(
                alive=self._end is None and not self._closing,
                version=self._version,
                running=self._running,
                waiting=len(self._inbox.waiting),
                capacity=self._batch.slots,
                decode_steps=self._decode_steps,
                generated_tokens=self._generated_tokens,
                busy_seconds=self._busy_seconds,
            )

    async def close(self) -> None:
        """End the compute thread after its step; the unfinished fails with EngineClosed. Idempotent."""
        with self._arrival:
            self._closing = True
            self._arrival.notify()
        await asyncio.to_thread(self._thread.join, _CLOSE_SECONDS)
        if self._thread.is_alive():
            raise EngineTimeout(f"the compute thread is still in one step after {_CLOSE_SECONDS} s")

    def _give_up(self, ids: Sequence[str]) -> None:
        with self._arrival:
            self._inbox.aborts.update(dict.fromkeys(ids))
            self._arrival.notify()

    def _check_open(self) -> None:
        if self._end is not None:
            raise type(self._end)(str(self._end)) from self._end.__cause__
        if self._closing:
            raise EngineClosed("the engine is closed")

    # From here on: the compute thread.

    def _compute(self) -> None:
        try:
            torch.set_num_threads(self._torch_threads)
            with torch.inference_mode():
                while (action := self._next()) is not None:
                    self._perform(action)
            end: EngineError = EngineClosed("the engine was closed before it could answer")
        except Exception as cause:  # noqa: BLE001 - handed on, with its traceback, to everyone who waits
            end = EngineFailed("the engine's compute thread failed:\n" + traceback.format_exc())
            end.__cause__ = cause
        self._finish(end)

    def _next(self) -> Action | None:
        running = [request.id for request in self._batch.requests]
        with self._arrival:
            while not self._closing:
                action = self._schedule.next(self._inbox, running, self._batch.free)
                if action is not None:
                    return action
                self._arrival.wait()  # until the next call, close among them
        return None

    def _perform(self, action: Action) -> None:
        started = time.perf_counter()
        match action:
            case Decode():
                sampled = len(self._batch)
                finished = self._batch.step()
                self._record(started, finished, sampled=sampled, steps=1)
                if self._log is not None:
                    self._log.decode()
            case Admit(ids):
                with self._lock:
                    requests = [self._inbox.waiting.pop(request_id) for request_id in ids]
                finished = self._batch.admit(requests)
                self._record(started, finished, sampled=len(requests))
                if self._log is not None:
                    self._log.admit(ids)
            case Commit():
                self._commit(started)
            case Abort(request_id):
                finished = self._batch.abort(request_id)
                if finished is None:
                    with self._lock:
                        del self._inbox.waiting[request_id]
                    finished = FinishedGeneration(request_id, _nothing())
                self._record(started, [finished])
                if self._log is not None:
                    self._log.abort(request_id)

    def _commit(self, started: float) -> None:
        with self._lock:
            staged, waiter = self._inbox.commit, self._committing
        assert staged is not None
        assert waiter is not None
        self._network.load(staged.tensors)
        retracted = self._batch.commit(staged.version)
        if self._log is not None:
            self._log.commit(staged.version)
        self._record(started, [])
        with self._lock:
            self._inbox.commit = self._committing = None
            self._version = staged.version
            reached = [one for version, one in self._awaiting if version <= staged.version]
        waiter.set_result(UpdateReport(staged.version, time.perf_counter() - started, retracted))
        for one in reached:
            one.set_result(staged.version)

    def _record(
        self, started: float, finished: Sequence[FinishedGeneration], *, sampled: int = 0, steps: int = 0
    ) -> None:
        deliveries: dict[GenerationStream, list[FinishedGeneration]] = {}
        with self._lock:
            self._running = len(self._batch)
            self._decode_steps += steps
            self._generated_tokens += sampled
            self._busy_seconds += time.perf_counter() - started
            for one in finished:
                deliveries.setdefault(self._streams.pop(one.id), []).append(one)
        for stream, batch in deliveries.items():
            stream.put(batch)

    def _finish(self, end: EngineError) -> None:
        with self._lock:
            self._end = end
            streams = dict.fromkeys(self._streams.values())
            waiters = [waiter for _, waiter in self._awaiting]
            committing = self._committing
            self._streams.clear()
            self._inbox = Inbox()
            self._running = 0
        for stream in streams:
            stream.fail(end)
        for waiter in waiters:
            waiter.set_exception(end)
        if committing is not None:
            committing.set_exception(end)


def _nothing() -> Generation:
    """What a request that was aborted while it waited has."""
    return Generation(
        tokens=np.zeros(0, np.int32), logprobs=np.zeros(0, np.float32), spans=[], finish_reason="abort"
    )
