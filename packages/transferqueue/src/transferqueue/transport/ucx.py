"""Payload over UCX, by way of the storage units: for hosts with a fabric that UCX can use.

It is optional (``pip install relax-transferqueue[ucx]``) and never the only way: `probe` says in words why it
cannot be used, and ZeroMQ moves the same payload then.

- `UcxServer` runs in a storage unit and reaches its arenas through a `Memory`;
- `UcxTransport` runs in a client, one for each unit.

Which wires are used is UCX's business (``UCX_TLS``, ``UCX_NET_DEVICES``); the wheels of the extra bring TCP,
and InfiniBand wants a UCX of the system. UCX listens on every address of a host and does not encrypt. Peers
that do not prove the token are refused, but before that UCX itself reads what strangers send, and malformed
bytes can cost it a core: use it only where the network between the hosts is trusted.
"""

from ..errors import QueueError
from .base import Unavailable
from .ucx_client import UcxTransport
from .ucx_runtime import UcxUnusable, acquire, release
from .ucx_server import Memory, UcxServer

__all__ = ["Memory", "UcxServer", "UcxTransport", "UcxUnusable", "probe"]


def probe(
    host: str | None = None, port: int = 0, *, token: str = "", timeout: float = 10.0
) -> Unavailable | None:
    """Why UCX cannot be used here, or None. Asks whether ucxx is installed, imports and starts, and, with a
    `host`, whether a unit answers there and accepts the token. Blocks for at most about `timeout` seconds.
    """
    try:
        runtime = acquire()
    except UcxUnusable as error:
        return Unavailable(str(error))
    try:
        if host is None:
            return None
        transport = UcxTransport(host, port, token=token)
        try:
            transport.ping(timeout=timeout).result(timeout + 15)
        except (QueueError, TimeoutError) as error:
            return Unavailable(str(error) or f"no answer over UCX from {host}:{port}")
        finally:
            transport.close()
        return None
    finally:
        release(runtime)
