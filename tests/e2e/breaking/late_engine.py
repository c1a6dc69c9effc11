"""The `transformers` engine after a start as long as a server's, or one that never comes to be."""

import asyncio
from typing import Any, Self

from relax.backends.inference.base import EngineSpec
from relax.backends.inference.errors import EngineError
from relax.backends.inference.transformers_engine import TransformersEngine

START_SECONDS = 12.0


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
