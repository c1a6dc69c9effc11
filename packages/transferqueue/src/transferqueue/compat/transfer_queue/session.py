"""`init`, `get_client` and `close`: the store that this process started or joined."""

import atexit
import contextlib
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ... import Server, connect, serve
from . import messages as m
from . import ray_discovery
from .catalog import Catalog
from .client import FREED, STORE_PARTITION, TransferQueueClient
from .config import Config, addressed, merged
from .errors import NotInitialized
from .packing import pack
from .sampler import made
from .service import CatalogServer

ADDRESS, TOKEN = "TRANSFER_QUEUE_ADDRESS", "TRANSFER_QUEUE_TOKEN"


@dataclass
class _Started:
    server: Server
    catalog: CatalogServer
    claim: ray_discovery.Claim | None


@dataclass
class _Session:
    """What `init` made. `pid`: a child of a fork shares neither sockets nor threads, and joins anew."""

    client: TransferQueueClient
    pid: int
    started: _Started | None = None


_current: _Session | None = None
_lock = threading.RLock()


def init(conf: Mapping[str, Any] | None = None) -> Config:
    """Starts a store, or joins the one that is named.

    The address comes from ``conf["address"]``, else from the environment variable ``TRANSFER_QUEUE_ADDRESS``
    (with ``TRANSFER_QUEUE_TOKEN``), which `init` sets where it starts a store, so that the processes this one
    starts join it. Else, if the program has Ray running, the first process of the Ray job to call `init`
    starts the store, and the others find it. Called again it does nothing.

    Args:
        conf: nested mappings, also OmegaConf's. Read here: ``address``, ``token``;
            ``controller.sampler`` (instance, class or name), ``controller.polling_mode``,
            ``controller.settle`` ("next" or "ack", see `TransferQueueClient.ack`);
            ``backend.SimpleStorage``: ``num_data_storage_units``, ``total_storage_size`` (samples),
            ``max_bytes``, ``host`` (off loopback it needs a ``token``).

    Returns:
        The configuration of the store, in every process. Its ``controller.zmq_info`` is what
        `StreamingDataset` and `TransferQueueClient` connect with, and ``controller.zmq_info.address`` what
        another process gives as ``address``.

    Raises:
        InvalidRequest: a setting cannot be.
        CatalogLost: nothing answers at the address.
        StartFailed: the store did not start.
    """
    global _current
    with _lock:
        if _current is None or _current.pid != os.getpid():
            config = merged(conf)
            address = config.address or os.environ.get(ADDRESS)
            token = config.token or os.environ.get(TOKEN)
            if address:
                where, said = addressed(address)
                _current = _Session(_client({"address": where, "token": said or token}), os.getpid())
            else:
                claim = ray_discovery.claim()
                if claim is not None and claim.found is not None:
                    _current = _Session(_client(claim.found), os.getpid())
                else:
                    _current = _start(config, token, claim)
                    atexit.register(close)
        return _current.client.config


def _client(info: Mapping[str, Any]) -> TransferQueueClient:
    return TransferQueueClient(f"client-{os.getpid()}", info)


def _start(config: Config, token: str | None, claim: ray_discovery.Claim | None) -> _Session:
    with contextlib.ExitStack() as stack:
        if claim is not None:
            stack.callback(claim.give_up)
            claim.check_reachable(config.backend.SimpleStorage.host)
        session = _started(config, token, claim, stack)
        if claim is not None:
            claim.publish({"address": session.client.config.controller.zmq_info.address, "token": token})
        stack.pop_all()
    os.environ[ADDRESS] = session.client.config.controller.zmq_info.address
    if token:
        os.environ[TOKEN] = token
    return session


def _started(
    config: Config, token: str | None, claim: ray_discovery.Claim | None, stack: contextlib.ExitStack
) -> _Session:
    sampler = made(config.controller.sampler)
    config.controller.sampler = type(sampler).__name__
    config.token, storage = None, config.backend.SimpleStorage  # the token travels with the address alone
    announced = int(os.environ.get("TQ_PRE_ALLOC_SAMPLE_NUM", 1))
    server = stack.enter_context(
        serve(
            int(storage.num_data_storage_units), max_bytes=storage.max_bytes, host=storage.host, token=token
        )
    )
    with connect(server) as queue:
        size = storage.total_storage_size
        queue.partition(STORE_PARTITION, {FREED: [FREED]}, max_samples=None if size is None else int(size))
    welcome = m.Welcome(server.address, token, pack(config))
    catalog = CatalogServer(Catalog(sampler, announced), welcome, token, storage.host, 0)
    stack.callback(catalog.close)
    client = _client({"address": catalog.address, "token": token})
    stack.callback(client.close)
    return _Session(client, os.getpid(), _Started(server, catalog, claim))


def get_client() -> TransferQueueClient:
    """The client of this process; joins the store that the environment names, if there was no `init`.

    Raises:
        NotInitialized: there is none.
    """
    session = _current
    if session is not None and session.pid == os.getpid():
        return session.client
    if not os.environ.get(ADDRESS):
        raise NotInitialized(f"call init() first, or set {ADDRESS} to the address of a store to join")
    init()
    return get_client()


def close() -> None:
    """Disconnects this process, and ends the store if this process started it. Idempotent."""
    global _current
    with _lock:
        session, _current = _current, None
    if session is None or session.pid != os.getpid():
        return
    session.client.close()
    if session.started is not None:
        atexit.unregister(close)
        if os.environ.get(ADDRESS) == session.started.catalog.address:
            os.environ.pop(ADDRESS)
            os.environ.pop(TOKEN, None)
        if session.started.claim is not None:
            session.started.claim.give_up()
        session.started.catalog.close()
        session.started.server.close()
