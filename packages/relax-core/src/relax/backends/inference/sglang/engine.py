"""The `sglang` engine: requests to a server, versions into it, and what becomes of both when it is lost."""

import asyncio
import itertools
import secrets
from collections.abc import Coroutine, Mapping, Sequence
from typing import Self

import dcs
from agentic import GenerationRequest
from agentic.generation import FinishReason
from torch import Tensor

from relax.backends.inference.base import EngineSpec, FinishedGeneration, Health, UpdateReport
from relax.backends.inference.errors import (
    EngineClosed,
    EngineError,
    EngineLost,
    EngineTimeout,
    InvalidRequest,
    InvalidUpdate,
    NotReady,
)
from relax.backends.inference.sglang.answers import Answer, BadAnswer, Finish
from relax.backends.inference.sglang.client import ServerGone, ServerRefused, ServerSilent, SglangClient
from relax.backends.inference.sglang.launch import Launched, launch
from relax.backends.inference.sglang.model import ServedModel
from relax.backends.inference.sglang.pictures import Pictures
from relax.backends.inference.sglang.progress import Progress
from relax.backends.inference.sglang.requests import body
from relax.backends.inference.sglang.versions import VersionPusher
from relax.backends.inference.streams import GenerationStream

NO_WEIGHTS = -1
"""The version of an engine that has committed none."""

FAULTS_OF_A_REQUEST, FAULTS_IN_A_ROW = 3, 8
"""So many errors of a server's own (a status of 500 and more) are too many: for one request, which then fails
alone, and without a whole answer between them, which loses the engine.
"""

LOOKS = 4
"""How often a server that has requests is looked at within `rollout.stall_seconds`."""


class SglangEngine:
    """An `InferenceEngine` over one SGLang server, launched or given by its address. Made by `create`.

    Requests of one call go to the server in one call, and it admits them together and in order. Logprobs are
    of the temperature-scaled distribution over the whole vocabulary. A token is drawn by its request's seed
    and its position only with `rollout.sglang.deterministic`; else the draws differ from run to run. A
    version is put in between two steps of the server; what runs meanwhile is computed anew under it
    (`rollout.sglang.pause`), and every token names the version that sampled it.

    A server that dies, that answers nonsense, or that has requests and does not get on is lost for good: all
    that waits raises `EngineLost`, with the tokens that had come, and a launched server is ended. One that
    answers a request with an error of its own is asked again, each request alone: what it cannot serve
    then fails alone, and only errors without an end lose the engine.
    """

    def __init__(self, spec: EngineSpec, launched: Launched) -> None:
        self._name = spec.name
        self._model: ServedModel = launched.model
        self._client: SglangClient = launched.client
        self._process = launched.process
        self._pusher: VersionPusher = launched.pusher
        self._capacity = launched.capacity
        rules = launched.model.pictures
        self._pictures = None if rules is None else Pictures(rules)
        self._tensors = launched.model.tensors
        self._max_running = spec.max_running
        self._captured = launched.model.captured if spec.routes else None
        self._stall_seconds = spec.settings.stall_seconds
        self._end: EngineError | None = None
        self._closed: asyncio.Task[None] | None = None

        self._run = secrets.token_hex(4)  # an external server may have requests of others
        self._count = itertools.count()
        self._open: dict[str, tuple[Answer, GenerationStream]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._version = self._newest = NO_WEIGHTS  # served; served or being put in
        self._faults = 0
        self._staged: tuple[int, dict[str, Tensor]] | None = None
        self._serving = asyncio.Event()
        self._serving.set()
        self._pushing: asyncio.Task[float] | None = None
        self._awaiting: list[tuple[int, asyncio.Future[int]]] = []

        self._committing = False
        self._progress = Progress()
        self._spawn(self._watch())
        if self._process is not None:
            self._spawn(self._follow_process())

    @classmethod
    async def create(cls, spec: EngineSpec) -> Self:
        """Start a server, or find the one at `rollout.sglang.urls`, and see that it fits.

        Raises:
            EngineError: it did not start (the message holds the end of its log), is not there, or is another
                kind of server than the settings say.
        """
        if spec.replay:
            raise EngineError(
                "the sglang engine cannot follow a recorded schedule: what SGLang batches together is its own"
            )
        return cls(spec, await launch(spec))

    # Generation

    def generate(self, requests: Sequence[GenerationRequest]) -> GenerationStream:
        """Ask for generations.

        Returns:
            An async iterator over `FinishedGeneration`. Left early (`aclose`, or its reader cancelled), it
            aborts the rest.

        Raises:
            InvalidRequest: a request that can never be served, or an id already in flight; none of the call
                is asked.
            NotReady: no weights yet.
            EngineLost, EngineClosed: the engine has ended.
        """
        requests = list(requests)
        for request in requests:
            self._model.check_request(request, self._capacity)
        self._check_open()
        if self._version == NO_WEIGHTS:
            raise NotReady(
                "the engine has no weights yet; commit a version first (wait_version tells when that is done)"
            )
        ids = [request.id for request in requests]
        for request_id in ids:
            if request_id in self._open or ids.count(request_id) > 1:
                raise InvalidRequest(f"request id {request_id!r} is already in flight; ids must be unique")
        stream = GenerationStream(ids, self._give_up)
        answers: list[Answer] = []
        for request in requests:
            limit = min(request.sampling.max_new_tokens, self._capacity - len(request.tokens))
            answers.append(Answer(request, limit, self._captured, self._model.vocabulary))
            self._open[request.id] = (answers[-1], stream)
        if answers:
            self._note_busy()
            self._spawn(self._ask(answers))
        return stream

    async def abort(self, request_id: str) -> None:
        """End a request with what it has, as `abort`. An unknown id is ignored."""
        if request_id in self._open:
            answer, _ = self._open[request_id]
            answer.aborted = True
            await self._abort([answer])

    def _give_up(self, ids: Sequence[str]) -> None:
        answers = [self._open[request_id][0] for request_id in ids if request_id in self._open]
        for answer in answers:
            answer.aborted = True
        if answers and self._end is None:
            self._spawn(self._abort(answers))

    async def _abort(self, answers: Sequence[Answer]) -> None:
        try:
            for answer in answers:
                if answer.asked:  # else the call that would ask it sees that it is given up
                    await self._client.post("/abort_request", {"rid": answer.rid})
        except (ServerGone, ServerRefused) as error:
            self._lose(f"it cannot be told to abort a request: {error}")

    async def _ask(self, answers: Sequence[Answer]) -> None:
        """One call to the server, and what follows from it."""
        try:
            for answer in answers:
                if answer.request.media and not answer.shows:
                    await self._show(answer)
            await self._serving.wait()
            live = [answer for answer in answers if not answer.aborted]
            for answer in answers:
                if answer.aborted:
                    self._deliver(answer, "abort")
            if live:
                await self._converse(live)
        except ServerRefused as refused:
            self._refuse(answers, refused)
        except InvalidRequest as error:
            self._fail(answers, error)
        except (ServerGone, BadAnswer) as error:
            self._lose(await self._why(error))

    async def _show(self, answer: Answer) -> None:
        """Pictures alone are files, which any server takes; what else there is are tensors."""
        if self._pictures is not None and self._model.shows_pictures(answer.request):
            answer.pictures = await asyncio.to_thread(self._pictures.of, answer.request)
        elif self._tensors is not None:
            answer.shown = await asyncio.to_thread(self._tensors.of, answer.request)

    async def _converse(self, answers: Sequence[Answer]) -> None:
        for answer in answers:
            # The server ends all whose name begins as the one to be ended: none here begins as another.
            answer.begin(f"{self._run}.{next(self._count)}.{answer.request.id}", self._version)
        again: list[Answer] = []
        running = set(range(len(answers)))
        sent = body(answers, self._version, self._model.never, self._model.pictures)
        unseen = {index for index, answer in enumerate(answers) if answer.shows}
        async for piece in self._client.generate(sent):
            if piece.meta_info is None or piece.index not in running:
                raise BadAnswer(f"a piece of a stream is about request {piece.index} of {len(answers)}")
            answer, meta = answers[piece.index], piece.meta_info
            if piece.index in unseen and meta.output_token_logprobs_length:
                self._check_prompt(answer, piece.prompt_token_ids)
                unseen.discard(piece.index)
            new = answer.take(meta)
            self._progress.came(new)
            if meta.finish_reason is None:
                if answer.aborted and new == len(answer.tokens) - answer.kept:
                    # It was given up before the server knew of it, and did not hear that.
                    self._spawn(self._abort([answer]))
                continue
            running.discard(piece.index)
            answer.asked = False
            self._check_versions(answer)
            if self._seen_by_others(answer):
                answer.forget()
                if not answer.aborted:
                    again.append(answer)
                    continue
            if self._goes_on(answer, meta.finish_reason):
                again.append(answer)
        if running:
            raise BadAnswer(f"a stream ended with {len(running)} of {len(answers)} requests unfinished")
        if again:
            alone = self._captured is not None
            for group in [[answer] for answer in again] if alone else [again]:
                self._spawn(self._ask(group))

    def _check_prompt(self, answer: Answer, seen: Sequence[int] | None) -> None:
        """Refuse an answer to another prompt: a server puts in the placeholders of files by itself."""
        asked = [*answer.request.tokens.tolist(), *answer.tokens[: answer.kept]]
        if seen != asked:
            told = "does not tell its prompt" if seen is None else f"makes {len(seen)} tokens of its prompt"
            raise InvalidRequest(
                f"request {answer.request.id!r} has {len(asked)} tokens, and {self._client.url} {told}: it "
                f"processes pictures otherwise than the run; start it with --mm-process-config "
                f'\'{{"image": {{"do_resize": false}}}}\''
            )

    def _check_versions(self, answer: Answer) -> None:
        """Only what was served when it was asked, and what was put in since, may have answered."""
        for version in answer.other_versions:
            if not answer.version <= version <= self._newest:
                raise BadAnswer(
                    f"request {answer.request.id!r} was answered by version {version}, and {self._version} "
                    f"is served; somebody else has changed the server's weights"
                )

    def _seen_by_others(self, answer: Answer) -> bool:
        """Whether a call came to a server that stood still for a version, and was answered by that one. Its
        files name the version before: what they show may be what that one's vision tower saw.
        """
        return bool(answer.shows and self._pusher.resumes and answer.other_versions)

    def _goes_on(self, answer: Answer, finish: Finish) -> bool:
        """Deliver an answer that is whole; True when it has to be asked again with what it has."""
        if finish.type == "abort" and finish.status_code is not None and finish.status_code >= 400:
            self._refuse([answer], ServerRefused(finish.status_code, finish.message))
        elif answer.aborted:
            self._deliver(answer, "abort")
        elif answer.tokens and answer.tokens[-1] in answer.request.sampling.stop_token_ids:
            self._deliver(answer, "stop")
        elif answer.room <= 0:
            self._deliver(answer, "length")
        elif finish.type == "length":
            raise BadAnswer(
                f"request {answer.request.id!r} ended at {len(answer.tokens)} tokens, and there is room for "
                f"{answer.limit}: the server's cache is too small for it (rollout.sglang.cache_tokens)"
            )
        elif finish.type == "abort" and not answer.interrupted:
            self._deliver(answer, "abort")  # somebody else has ended it
        elif finish.type == "stop" and (isinstance(finish.matched, str) or len(answer.tokens) == answer.kept):
            raise BadAnswer(f"request {answer.request.id!r} was stopped by {finish.matched!r}")
        else:
            # The model's own end token is none of the run's, or a version is put in.
            return True
        return False

    def _deliver(self, answer: Answer, reason: FinishReason) -> None:
        found = self._open.pop(answer.request.id, None)
        self._note_busy()
        if reason != "abort":
            self._faults = 0
        if found is not None:
            found[1].put([FinishedGeneration(answer.request.id, answer.generation(reason))])

    def _refuse(self, answers: Sequence[Answer], refused: ServerRefused) -> None:
        """The server does not take a request, so the call it belongs to fails; or it has an error of its own,
        which may be over, or that of another request of the call: each is asked again alone.
        """
        answers = [answer for answer in answers if self._is_open(answer)]
        if refused.status >= 500:
            self._faults += 1
            if self._faults >= FAULTS_IN_A_ROW:
                self._lose(f"{refused}, {self._faults} times without an answer between{self._log_tail()}")
                return
            again = []
            for answer in answers:
                answer.faults += 1
                again += [answer] * (answer.faults < FAULTS_OF_A_REQUEST)
            if again:
                self._spawn(self._ask_alone(again))
            answers = [answer for answer in answers if answer.faults >= FAULTS_OF_A_REQUEST]
        for answer in answers:
            times = f", {answer.faults} times" if answer.faults > 1 else ""
            named = f"request {answer.request.id!r} was refused by {self._client.url}{times}: {refused}"
            if answer.shown is not None and self._process is None:
                named += (
                    "; what it shows are tensors, which a server takes that is started with "
                    "SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE=relax_media (docs/how-to/use-sglang.md)"
                )
            self._fail([answer], InvalidRequest(named))

    async def _ask_alone(self, answers: Sequence[Answer]) -> None:
        """Ask again, one call each, for what a call has failed to bring."""
        await self._abort(answers)
        for answer in answers:
            answer.asked = False
            answer.forget()
            self._spawn(self._ask([answer]))

    def _is_open(self, answer: Answer) -> bool:
        return self._open.get(answer.request.id, (None,))[0] is answer

    def _fail(self, answers: Sequence[Answer], error: InvalidRequest) -> None:
        """Fail the calls of `generate` that these belong to, and give up what else they asked for."""
        failed = {self._open[answer.request.id][1] for answer in answers if self._is_open(answer)}
        rest = [answer for answer, stream in self._open.values() if stream in failed]
        for answer in rest:
            del self._open[answer.request.id]
            answer.aborted = True
        for stream in failed:
            stream.fail(error)
        if any(answer.asked for answer in rest):
            self._spawn(self._abort(rest))
        self._note_busy()

    # Weights

    def weights(self) -> Mapping[str, Tensor]:
        """The weights by Hugging Face name, on torch's meta device: what a version has to look like."""
        return self._model.weights

    async def begin_update(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Take a version's complete weights, to be committed; one begun and not committed is forgotten. The
        tensors must stay as they are until `commit_update` has returned.

        Raises:
            InvalidUpdate: a name, shape or dtype that does not fit, or a version not above the served one.
            EngineLost, EngineClosed: the engine has ended.
        """
        self._model.check_version(version, tensors)
        self._check_open()
        if version <= self._version:
            raise InvalidUpdate(
                f"version {version} was begun, but version {self._version} is served; versions only rise"
            )
        self._staged = (version, dict(tensors))

    async def commit_update(self, version: int) -> UpdateReport:
        """Pause the server, put the begun version in, and let it go on.

        Raises:
            InvalidUpdate: the version was not begun, or another commit is under way.
            EngineLost: it did not go in whole, so the server must not serve any more.
            EngineClosed: the engine has ended.
        """
        self._check_open()
        if self._staged is None or self._staged[0] != version:
            begun = "none" if self._staged is None else f"version {self._staged[0]}"
            raise InvalidUpdate(
                f"version {version} is to be committed, but {begun} was begun; call begin_update before "
                f"commit_update"
            )
        if self._committing:
            raise InvalidUpdate(f"version {version} is to be committed while another commit is under way")
        _, tensors = self._staged
        self._staged, self._committing, self._newest = None, True, version
        held = [answer for answer, _ in self._open.values() if answer.asked]
        for answer in held:
            answer.hold(interrupted=self._pusher.resumes)
        if self._pusher.resumes:
            self._serving.clear()
        self._pushing = asyncio.create_task(self._pusher.push(version, tensors))
        try:
            pause = await asyncio.shield(self._pushing)
        except dcs.LayoutMismatch as error:
            self._newest = self._version  # the server was not spoken to
            raise InvalidUpdate(f"version {version} does not fit {self._client.url}: {error}") from error
        except dcs.DcsError as error:
            self._lose(await self._why(error))
            self._check_open()
            raise
        finally:
            self._committing = False
            self._progress.moved()
            self._serving.set()
        self._check_open()  # it may have been lost or closed meanwhile
        self._version = version
        for wanted, future in self._awaiting:
            if wanted <= version and not future.done():
                future.set_result(version)
        return UpdateReport(version, pause, len(held))

    async def wait_version(self, version: int, timeout: float) -> int:
        """Wait until a version at or above `version` is committed, and return the one that is.

        Raises:
            EngineTimeout: it was not committed within `timeout` seconds.
            EngineLost, EngineClosed: the engine has ended, or ended meanwhile.
        """
        self._check_open()
        if self._version >= version:
            return self._version
        entry = (version, asyncio.get_running_loop().create_future())
        self._awaiting.append(entry)
        try:
            async with asyncio.timeout(timeout):
                return await entry[1]
        except TimeoutError:
            raise EngineTimeout(
                f"version {version} was not committed within {timeout} s; the engine serves version "
                f"{self._version}"
            ) from None
        finally:
            self._awaiting.remove(entry)

    # Life

    async def health(self) -> Health:
        """How the engine is. A server that does not answer is told with the numbers known last, so that it is
        seen not to get on; one that is lost or closed is not `alive`.
        """
        alive = self._end is None
        if alive:
            try:
                self._progress.note_load(await self._client.load())
            except ServerSilent:
                pass  # it may still come back; `decode_steps` stays where it was
            except (ServerGone, ServerRefused, BadAnswer) as error:
                self._lose(await self._why(error))
                alive = False
        progress = self._progress
        return Health(
            alive=alive,
            version=self._version,
            running=progress.load.running if alive else 0,
            waiting=progress.load.waiting if alive else 0,
            capacity=self._max_running,
            decode_steps=progress.steps,
            generated_tokens=progress.generated,
            busy_seconds=progress.busy_seconds,
        )

    async def close(self) -> None:
        """End what is unfinished with EngineClosed, and the server if it was launched. Idempotent."""
        self._finish(EngineClosed("the engine was closed before it could answer"))
        if self._closed is None:
            self._closed = asyncio.create_task(self._let_go())
        await asyncio.shield(self._closed)

    async def _let_go(self) -> None:
        rest = [answer.rid for answer, _ in self._open.values() if answer.asked]
        self._open.clear()
        if self._process is not None:
            await self._process.close()
        else:
            await self._abandon(rest)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._pushing is not None:  # it works in a thread, and a call of it has a deadline
            await asyncio.gather(self._pushing, return_exceptions=True)
        await self._pusher.close()
        await self._client.close()

    async def _abandon(self, rids: Sequence[str]) -> None:
        """End what a server that others use too would go on with for nobody."""
        try:
            for rid in rids:
                await self._client.post("/abort_request", {"rid": rid})
        except (ServerGone, ServerRefused):
            return  # then nothing of ours runs there

    async def _watch(self) -> None:
        """See that a server with requests gets on; one that does not is lost."""
        pause = self._stall_seconds / LOOKS
        while True:
            await self._progress.busy.wait()
            try:
                self._progress.note_load(await self._client.load())
            except ServerSilent:
                pass
            except (ServerGone, ServerRefused, BadAnswer) as error:
                self._lose(await self._why(error))
                return
            still = self._progress.still_seconds
            if self._open and not self._committing and still >= self._stall_seconds:
                self._lose(
                    f"it has {len(self._open)} requests and has not got on for {still:.0f} s "
                    f"(rollout.stall_seconds = {self._stall_seconds:g}){self._log_tail()}"
                )
                return
            await asyncio.sleep(pause)

    async def _follow_process(self) -> None:
        assert self._process is not None
        self._lose(await asyncio.shield(self._process.ended))

    async def _why(self, error: Exception) -> str:
        """What is to be said of a server that failed a call: if it died meanwhile, that."""
        if self._process is None:
            return str(error)
        done, _ = await asyncio.wait({self._process.ended}, timeout=1.0)
        return self._process.ended.result() if done else f"{error}{self._log_tail()}"

    def _log_tail(self) -> str:
        return "" if self._process is None else f"\n{self._process.tail()}"

    def _lose(self, reason: str) -> None:
        """The server is gone, or must not serve any more. It is ended, if it was launched."""
        if self._end is None:
            self._finish(EngineLost(self._name, reason))
            if self._process is not None:
                self._spawn(self._process.close())

    def _finish(self, end: EngineError) -> None:
        if self._end is not None:
            return
        self._end = end
        by_stream: dict[GenerationStream, list[Answer]] = {}
        for answer, stream in self._open.values():
            by_stream.setdefault(stream, []).append(answer)
        for stream, answers in by_stream.items():
            stream.fail(self._told(end, answers))
        for _, future in self._awaiting:
            if not future.done():
                future.set_exception(end)
        if isinstance(end, EngineLost):
            self._open.clear()
        self._note_busy()

    def _told(self, end: EngineError, answers: Sequence[Answer]) -> EngineError:
        if not isinstance(end, EngineLost):
            return end
        partial = {answer.request.id: kept for answer in answers if (kept := answer.partial()) is not None}
        return EngineLost(end.engine, end.reason, partial)

    def _check_open(self) -> None:
        if isinstance(self._end, EngineLost):
            raise EngineLost(self._end.engine, self._end.reason)
        if self._end is not None:
            raise EngineClosed("the engine is closed")

    def _note_busy(self) -> None:
        """Requests have come or gone."""
        self._progress.note_requests(bool(self._open) and self._end is None)

    def _spawn(self, what: Coroutine[object, object, None]) -> None:
        task = asyncio.create_task(what)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
