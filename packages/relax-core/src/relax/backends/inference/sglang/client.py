"""HTTP to one server: generation streams, control calls, what it says of itself. A deadline on every call but
a generation, which its engine watches over.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from relax.backends.inference.errors import EngineError
from relax.backends.inference.sglang.answers import BadAnswer, Piece

CONNECT_SECONDS = 10.0
_SHOWN = 600


class ServerGone(EngineError):
    """A server cannot be reached, or has broken off in the middle of an answer."""


class ServerSilent(ServerGone):
    """A server takes connections and does not answer in time."""


class ServerRefused(EngineError):
    """A server answered with an error of its own; `status` is HTTP's."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(status, message)
        self.status = status
        self.message = message

    def __str__(self) -> str:
        return f"the server answered {self.status}: {self.message}"


class Rank(msgspec.Struct):
    """How one data-parallel rank of a server fares."""

    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    total_prefill_uncached_tokens: int = 0
    decode_moments: list[float] | None = None


class _Loads(msgspec.Struct):
    loads: list[Rank]


@dataclass(frozen=True)
class Load:
    """How a server fares, all its ranks together. The last three only grow.

    Attributes:
        running, waiting: requests that it decodes, and that wait.
        decode_steps, decoded: decode steps, and tokens that they made.
        prefilled: prompt tokens that it has computed.
    """

    running: int
    waiting: int
    decode_steps: int
    decoded: int
    prefilled: int


class ServerInfo(msgspec.Struct):
    """What a server says it was started with."""

    context_length: int | None = None
    max_req_input_len: int | None = None
    tp_size: int = 1
    dp_size: int = 1
    pp_size: int = 1
    enable_return_routed_experts: bool = False
    enable_deterministic_inference: bool = False
    version: str = "?"
    model_path: str = ""


class SglangClient:
    """Made on the event loop that it is used from.

    Args:
        url: of the server.
        api_key: sent as a bearer token.
        answer_seconds: of a call that gives no time of its own.
    """

    def __init__(self, url: str, *, api_key: str | None = None, answer_seconds: float = 10.0) -> None:
        self.url = url.rstrip("/")
        self._answer_seconds = answer_seconds
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._session = aiohttp.ClientSession(
            headers=headers,
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
        )

    async def generate(self, body: dict[str, Any]) -> AsyncIterator[Piece]:
        """The pieces of a stream, until the server has ended it in order.

        Raises:
            ServerRefused: it does not take the call.
            ServerGone: it cannot be reached, or breaks off.
            BadAnswer: what comes is no stream of pieces.
        """
        try:
            async with self._session.post(f"{self.url}/generate", json=body) as answer:
                if answer.status != 200:
                    raise ServerRefused(answer.status, (await answer.text())[:_SHOWN])
                async for message in _messages(answer.content):
                    if message == b"[DONE]":
                        return
                    try:
                        piece = msgspec.json.decode(message, type=Piece)
                    except (msgspec.DecodeError, msgspec.ValidationError) as error:
                        raise BadAnswer(
                            f"{self.url}/generate sent what is no answer ({error}): {message[:_SHOWN]!r}"
                        ) from error
                    if piece.error is not None:
                        raise ServerRefused(piece.error.code, piece.error.message[:_SHOWN])
                    yield piece
                raise ServerGone(f"{self.url}/generate ended in the middle of a stream")
        except (aiohttp.ClientError, OSError) as error:
            raise ServerGone(f"{self.url}/generate: {error!r}") from error

    async def post(self, path: str, body: object = None, seconds: float | None = None) -> Any:
        """What `POST path` answers, read as JSON where it is JSON; raises as `get`."""
        return await self._call("POST", path, {} if body is None else body, seconds)

    async def get(self, path: str, seconds: float | None = None) -> bytes:
        """What `GET path` answers.

        Raises:
            ServerRefused: an error of its own.
            ServerSilent: no answer in time.
            ServerGone: it cannot be reached.
        """
        return await self._call("GET", path, None, seconds)

    async def load(self) -> Load:
        """How the server fares; raises as `get`, and BadAnswer."""
        path = "/v1/loads?include=core"
        ranks = self._decoded(await self.get(path), _Loads, path).loads
        moments = [rank.decode_moments or [0.0, 0.0] for rank in ranks]
        return Load(
            sum(rank.num_running_reqs for rank in ranks),
            sum(rank.num_waiting_reqs for rank in ranks),
            sum(int(steps) for steps, *_ in moments),
            sum(int(tokens) for _, tokens, *_ in moments),
            sum(rank.total_prefill_uncached_tokens for rank in ranks),
        )

    async def info(self) -> ServerInfo:
        """What the server was started with; raises as `load`."""
        return self._decoded(await self.get("/server_info"), ServerInfo, "/server_info")

    async def answers(self) -> bool:
        """Whether the server is up and its scheduler answers."""
        try:
            await self.info()
        except (ServerGone, ServerRefused):
            return False
        return True

    async def close(self) -> None:
        await self._session.close()

    def _decoded[T](self, content: bytes, kind: type[T], path: str) -> T:
        try:
            return msgspec.json.decode(content, type=kind)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise BadAnswer(
                f"{self.url}{path} answered what no SGLang server answers ({error}): {content[:_SHOWN]!r}"
            ) from error

    async def _call(self, method: str, path: str, body: object, seconds: float | None) -> bytes:
        limit = self._answer_seconds if seconds is None else seconds
        try:
            async with asyncio.timeout(limit):
                async with self._session.request(method, self.url + path, json=body) as answer:
                    content = await answer.read()
        except TimeoutError:
            raise ServerSilent(f"{method} {self.url}{path} was not answered within {limit:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise ServerGone(f"{method} {self.url}{path}: {error!r}") from error
        if answer.status // 100 != 2:
            raise ServerRefused(answer.status, content[:_SHOWN].decode(errors="replace"))
        return content


async def _messages(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """The data of server-sent events, one at a time, however long."""
    parts: list[bytes] = []
    async for chunk in content.iter_any():
        *ended, rest = chunk.split(b"\n")
        for line in ended:
            line = b"".join([*parts, line])
            parts.clear()
            if line.startswith(b"data:"):
                yield line[5:].strip()
        if rest:
            parts.append(rest)
