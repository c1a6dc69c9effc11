"""How the processes of a Ray job find their store without being told: a named actor has its address.

Ray is only used where the program has it running already; nothing here imports it.
"""

import asyncio
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .errors import InvalidRequest

_NAME, _NAMESPACE = "transfer_queue_address", "transfer_queue"
_SECONDS = 120.0


class Announcement:
    """The actor. It ends with the process that made it."""

    def __init__(self) -> None:
        self._said = asyncio.Event()
        self._info: dict[str, Any] = {}

    async def publish(self, info: dict[str, Any]) -> None:
        self._info = info
        self._said.set()

    async def read(self) -> dict[str, Any]:
        """Waits until it is published."""
        await self._said.wait()
        return self._info


@dataclass(frozen=True)
class Claim:
    """What a process learns when it asks. `found`: address and token of the store there is; None: this
    process has to start it, and say so.
    """

    ray: Any
    actor: Any
    found: Mapping[str, Any] | None

    def check_reachable(self, host: str) -> None:
        """Raises InvalidRequest if a store on `host` could not be reached from all nodes of the cluster."""
        nodes = [node for node in self.ray.nodes() if node["Alive"]]
        if len(nodes) > 1 and host in ("127.0.0.1", "localhost", "::1"):
            raise InvalidRequest(
                f"the Ray cluster has {len(nodes)} nodes, which cannot reach {host}; set "
                "backend.SimpleStorage.host to the address of this node, and a token"
            )

    def publish(self, info: dict[str, Any]) -> None:
        """Tells the processes that wait for it."""
        self.ray.get(self.actor.publish.remote(info), timeout=_SECONDS)

    def give_up(self) -> None:
        """Lets another process claim it: the store has ended, or did not start."""
        if self.ray.is_initialized():
            self.ray.kill(self.actor)


def claim() -> Claim | None:
    """Finds the store of this Ray job, or claims to start it. None where the program has no Ray running."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return None
    try:
        maker = ray.remote(num_cpus=0)(Announcement).options(name=_NAME, namespace=_NAMESPACE)
        return Claim(ray, maker.remote(), None)
    except ValueError:  # the name is taken
        actor = ray.get_actor(_NAME, namespace=_NAMESPACE)
    return Claim(ray, actor, ray.get(actor.read.remote(), timeout=_SECONDS))
