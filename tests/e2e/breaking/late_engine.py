"""The `transformers` engine after a start as long as that of a server, and two that never come to be: the one
fails, and the server of the other starts for ever, with parts in sessions of their own.
"""

import asyncio
import os
import sys
from typing import Any, Self

from relax.backends.inference.base import EngineSpec
from relax.backends.inference.errors import EngineError
from relax.backends.inference.sglang.process import ServerProcess
from relax.backends.inference.transformers_engine import TransformersEngine

START_SECONDS = 12.0
SERVER = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.setsid()
    print("part", os.getpid(), flush=True)
time.sleep(1000)
"""


class LateEngine(TransformersEngine):
    @classmethod
    async def create(cls, spec: EngineSpec) -> Self:
        await asyncio.sleep(START_SECONDS)
        return await super().create(spec)


class NoEngine(TransformersEngine):
    @classmethod
    async def create(cls, spec: EngineSpec) -> Any:
        await asyncio.sleep(0.5)
        raise EngineError(
            f"{spec.name}: the server did not start: libno.so.1: cannot open shared object file"
        )


class StartingEngine(TransformersEngine):
    @classmethod
    async def create(cls, spec: EngineSpec) -> Any:
        log = spec.run_folder / "logs" / f"{spec.name}.sglang.log"
        server = ServerProcess.start([sys.executable, "-S", "-c", SERVER], os.environ, log)
        await server.ready(lambda: asyncio.sleep(0, False), 1000.0)
