"""A server that is ready for an engine: started, or found at its address, and held against the settings."""

import os
from dataclasses import dataclass

import dcs

from relax.backends.inference.base import EngineSpec
from relax.backends.inference.errors import EngineError
from relax.backends.inference.sglang.answers import BadAnswer
from relax.backends.inference.sglang.client import ServerGone, ServerInfo, ServerRefused, SglangClient
from relax.backends.inference.sglang.flags import command, environment
from relax.backends.inference.sglang.model import ServedModel
from relax.backends.inference.sglang.process import ReservedPort, ServerFailed, ServerProcess
from relax.backends.inference.sglang.versions import VersionPusher
from relax.ops.leavable import leavable

_SPARE_INPUT = 2
"""What a server says of its longest prompt, less this, is what prompt and answer may have together: it keeps
eight tokens of its context for itself, six of which are taken off there.
"""


@dataclass(frozen=True)
class Launched:
    """What an engine stands on.

    Attributes:
        process: of the server; None for one that was there.
        capacity: most tokens of prompt and response together.
    """

    model: ServedModel
    client: SglangClient
    pusher: VersionPusher
    process: ServerProcess | None
    capacity: int


async def launch(spec: EngineSpec) -> Launched:
    """Make everything an engine needs; leaves nothing behind when that fails.

    Raises:
        EngineError: see `SglangEngine.create`.
    """
    settings = spec.settings.sglang
    completed = spec.run_folder / "sglang" / spec.name
    model = await leavable(lambda: ServedModel.read(spec.folder, spec.dtype, completed, spec.seed))
    capacity = min(model.context, spec.capacity_tokens or model.context)
    api_key = _api_key(settings.api_key_env)
    process: ServerProcess | None = None
    client: SglangClient | None = None
    pusher: VersionPusher | None = None
    try:
        if settings.urls:
            url = _url(spec)
            client = SglangClient(url, api_key=api_key, answer_seconds=settings.health_seconds)
            info = await _info(client)
            capacity = min(capacity, (info.max_req_input_len or capacity) - _SPARE_INPUT)
        else:
            process, client = await _start(spec, model, capacity)
            info = await _info(client)
            room = (info.max_req_input_len or capacity) - _SPARE_INPUT
            if room < capacity:
                raise EngineError(
                    f"{spec.name}: the server's cache holds sequences of {room} tokens, and the context is "
                    f"{capacity}; lower model.context_length, or raise rollout.sglang.cache_tokens or "
                    f"memory_fraction"
                )
        if capacity < 2:
            raise EngineError(f"{spec.name}: {client.url} has no room for a prompt and an answer")
        _hold_against(spec, info, client.url)
        _check_pause(spec, model)
        pusher = await VersionPusher.create(client.url, model, settings, api_key, routes=spec.routes)
        return Launched(model, client, pusher, process, capacity)
    except BaseException as error:
        if process is not None:
            await process.close()
        if client is not None:
            await client.close()
        if isinstance(error, dcs.DcsError):
            raise EngineError(f"{spec.name}: weights cannot be put into its server: {error}") from error
        raise


async def _start(spec: EngineSpec, model: ServedModel, capacity: int) -> tuple[ServerProcess, SglangClient]:
    settings = spec.settings.sglang
    port = ReservedPort()
    process: ServerProcess | None = None
    client: SglangClient | None = None
    try:
        process = ServerProcess.start(
            command(
                spec,
                model.folder,
                port.number,
                capacity,
                pictures=model.pictures is not None,
                hollow=model.hollow,
            ),
            environment(spec, os.environ, shown=model.shows),
            spec.run_folder / "logs" / f"{spec.name}.sglang.log",
        )
        client = SglangClient(f"http://127.0.0.1:{port.number}", answer_seconds=settings.health_seconds)
        await process.ready(client.answers, settings.start_seconds)
        process.watch(process.parts())
        return process, client
    except BaseException as error:
        if process is not None:
            await process.close()
        if client is not None:
            await client.close()
        if isinstance(error, ServerFailed):
            raise ServerFailed(f"{spec.name}: {error}") from error
        raise
    finally:
        port.close()


async def _info(client: SglangClient) -> ServerInfo:
    try:
        return await client.info()
    except (ServerGone, ServerRefused, BadAnswer) as error:
        raise EngineError(f"no SGLang server answers at {client.url}: {error}") from error


def _hold_against(spec: EngineSpec, info: ServerInfo, url: str) -> None:
    """Refuse a server that could not do what the settings ask for."""
    settings = spec.settings.sglang
    if spec.routes and not info.enable_return_routed_experts:
        raise EngineError(
            f"{url} does not tell which experts it used; start it with --enable-return-routed-experts"
        )
    if settings.deterministic and not info.enable_deterministic_inference:
        raise EngineError(
            f"{url} does not draw by seeds; start it with --enable-deterministic-inference, or set "
            f"rollout.sglang.deterministic=false"
        )
    if settings.weights != "disk" and (info.dp_size != 1 or info.pp_size != 1):
        raise EngineError(
            f"{url} has {info.dp_size} data-parallel and {info.pp_size} pipeline-parallel ranks, and such a "
            f"server takes weights from files only; set rollout.sglang.weights=disk, or give each replica a "
            f"server of its own"
        )


def _check_pause(spec: EngineSpec, model: ServedModel) -> None:
    """A request that a server holds over an update goes on with what the old vision tower saw."""
    if model.shows and spec.settings.sglang.pause == "retract":
        raise EngineError(
            f"{spec.name}: rollout.sglang.pause = retract with a model that sees or hears: a server keeps "
            f"what its towers made of what they were shown, and would go on with that of older weights; set "
            f"rollout.sglang.pause=auto"
        )


def _url(spec: EngineSpec) -> str:
    urls = spec.settings.sglang.urls
    if spec.number >= len(urls):
        raise EngineError(
            f"{spec.name} has no server: rollout.sglang.urls names {len(urls)}; name one for each replica"
        )
    return urls[spec.number]


def _api_key(variable: str | None) -> str | None:
    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
        raise EngineError(f"rollout.sglang.api_key_env = {variable!r}: there is no such environment variable")
    return key
