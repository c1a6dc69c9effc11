"""Versions of weights into a server: which of dcs's ways, and what becomes of running requests meanwhile."""

import asyncio
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import dcs
from dcs.appliers import SglangApplier
from torch import Tensor

from relax.backends.inference.sglang.model import ServedModel
from relax.config.sglang import SglangSettings


@dataclass(frozen=True)
class Pushed:
    """A version as an applier takes it."""

    version: int
    epoch: int
    tensors: Mapping[str, Tensor]


class VersionPusher:
    """One server's versions. dcs's applier blocks, so it works in a thread.

    Attributes:
        resumes: running requests are ended for a version, and have to be asked again.
    """

    def __init__(self, applier: SglangApplier, model: ServedModel, *, resumes: bool) -> None:
        self._applier = applier
        self._model = model
        self.resumes = resumes
        self._epochs = itertools.count(1)

    @classmethod
    async def create(
        cls, url: str, model: ServedModel, settings: SglangSettings, api_key: str | None, *, routes: bool
    ) -> "VersionPusher":
        """Look at what the server is and takes.

        Raises:
            dcs.DcsError: it does not answer, or its parallelism does not take weights in that way.
        """
        asks_again = routes or model.shows
        resumes = settings.pause == "resume" or (settings.pause == "auto" and asks_again)
        pause: Literal["abort", "retract", "in_place"] = "retract"
        if resumes:
            pause = "abort"
        elif settings.pause == "in_place":
            pause = "in_place"
        options: dict[str, Any] = {
            "layout": dcs.layout.of(model.for_server(model.weights)),
            "model": model.folder,
            "mode": settings.weights,
            "pause": pause,
            "api_key": api_key,
            "timeout_seconds": settings.call_seconds,
            "host": settings.weights_host,
            "backend": settings.weights_backend,
            "directory": settings.weights_folder,
        }
        applier = await asyncio.to_thread(SglangApplier, url, **options)
        return cls(applier, model, resumes=resumes)

    async def push(self, version: int, tensors: Mapping[str, Tensor]) -> float:
        """Put a version in; returns the seconds that the server stood still.

        Raises:
            dcs.LayoutMismatch: it does not fit; the server was not spoken to.
            dcs.ApplyFailed: it did not go in.
        """
        pushed = Pushed(version, next(self._epochs), self._model.for_server(tensors))
        await asyncio.to_thread(self._applier, pushed)
        assert self._applier.last is not None
        return self._applier.last.pause_seconds

    async def close(self) -> None:
        """Let go of what it holds, here and in the server. Idempotent."""
        await asyncio.to_thread(self._applier.close)
