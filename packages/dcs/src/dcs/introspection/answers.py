"""What is answered to a GET: status, headers and body, from a snapshot of the coordinator."""

import hmac
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from urllib.parse import parse_qs, urlsplit

import msgspec

from dcs.control.views import RunView, Topology, VersionView
from dcs.errors import DcsError
from dcs.introspection.extras import MissingExtra, load

RECENT_VERSIONS = 4
"""How many versions of each run `/topology` has; `/versions` has all that the coordinator remembers."""

_SHARED_SECONDS = 0.25  # how old a snapshot may be that a second request gets, so that a flood costs nothing


class RunVersions(msgspec.Struct, frozen=True):
    """The versions of one run, oldest first."""

    name: str
    epoch: int
    version: int
    versions: tuple[VersionView, ...]


class Versions(msgspec.Struct, frozen=True):
    """What `/versions` answers; `at` is in Unix seconds."""

    at: float
    runs: tuple[RunVersions, ...]


@dataclass(frozen=True)
class Answer:
    """What goes back to whoever asked."""

    status: int
    body: bytes
    kind: str = "text/plain; charset=utf-8"
    headers: Mapping[str, str] = field(default_factory=dict)


class Answers:
    """Answers requests from snapshots, which requests at about the same time share.

    Args:
        snapshot: of the coordinator; may be called from any thread.
        alive: whether the coordinator serves.
        token: that every request but `/healthz` has to show; None lets everybody in.
    """

    def __init__(
        self, snapshot: Callable[[], Topology], alive: Callable[[], bool], token: str | None
    ) -> None:
        self._snapshot = snapshot
        self._alive = alive
        self._token = token
        self._lock = threading.Lock()
        self._last: tuple[float, Topology] | None = None

    def get(self, target: str, authorization: str | None, accept: str = "") -> Answer:
        """The answer to `GET target` with these headers ("Authorization", "Accept")."""
        try:
            address = urlsplit(target)
        except ValueError as error:
            return _text(400, f"{target!r} is no address: {error}")
        if address.path == "/healthz":
            alive = self._alive()
            return _text(200 if alive else 503, "ok" if alive else "the coordinator has ended")
        if not self._may_read(authorization):
            text = "give the coordinator's token as 'Authorization: Bearer TOKEN'"
            return Answer(401, f"{text}\n".encode(), headers={"WWW-Authenticate": 'Bearer realm="dcs"'})
        respond = {"/topology": _topology, "/versions": _versions}.get(address.path)
        if respond is None and address.path != "/metrics":
            return _text(404, "there are /topology, /versions, /metrics and /healthz")
        try:
            topology = self._read()
            return _metrics(topology, accept) if respond is None else respond(topology, address.query)
        except MissingExtra as error:
            return _text(501, str(error))
        except DcsError as error:
            return _text(503, str(error))

    def _may_read(self, authorization: str | None) -> bool:
        if self._token is None:
            return True
        scheme, _, shown = (authorization or "").partition(" ")
        # Headers are bytes, which `http.server` reads as latin-1.
        matches = hmac.compare_digest(shown.strip().encode("latin-1"), self._token.encode())
        return matches and scheme.lower() == "bearer"

    def _read(self) -> Topology:
        with self._lock:  # whoever comes while a snapshot is made gets that one
            if self._last is None or time.monotonic() - self._last[0] >= _SHARED_SECONDS:
                topology = self._snapshot()
                self._last = (time.monotonic(), topology)
            return self._last[1]


def _text(status: int, text: str) -> Answer:
    return Answer(status, f"{text}\n".encode())


def _json(value: msgspec.Struct) -> Answer:
    return Answer(200, msgspec.json.encode(value), "application/json")


def _topology(topology: Topology, query: str) -> Answer:
    runs = _wanted(topology, query)
    if isinstance(runs, Answer):
        return runs
    short = (msgspec.structs.replace(run, versions=run.versions[-RECENT_VERSIONS:]) for run in runs)
    return _json(msgspec.structs.replace(topology, runs=tuple(short)))


def _versions(topology: Topology, query: str) -> Answer:
    runs = _wanted(topology, query)
    if isinstance(runs, Answer):
        return runs
    return _json(
        Versions(
            topology.at,
            tuple(RunVersions(run.name, run.epoch, run.version, run.versions) for run in runs),
        )
    )


def _wanted(topology: Topology, query: str) -> tuple[RunView, ...] | Answer:
    """Those of `?run=NAME`, else all."""
    names = parse_qs(query).get("run")
    if names is None:
        return topology.runs
    runs = tuple(run for run in topology.runs if run.name in names)
    return runs or _text(404, f"no run {names[0]!r} here; there are {[run.name for run in topology.runs]}")


def _metrics(topology: Topology, accept: str) -> Answer:
    body, kind = load("metrics", "metrics").exposition(topology, accept)
    return Answer(200, body, kind)
