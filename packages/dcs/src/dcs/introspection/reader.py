"""Reading a coordinator's topology over HTTP, again and again, across its restarts."""

import http.client
import math
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import msgspec

from dcs.control.views import Topology
from dcs.errors import CoordinatorLost, DcsError, ProtocolError, Timeout, Unauthorized

GONE = (CoordinatorLost, Timeout)
"""What a reading fails with while a coordinator is away and may come back."""

_MOST_BYTES = 256 << 20  # of an answer


@dataclass(frozen=True)
class Reading:
    """What a coordinator said of itself, and when: `at` is in seconds of `time.monotonic`."""

    at: float
    topology: Topology


class TopologyReader:
    """Reads `/topology`, a connection each time.

    Args:
        address: ``host:port`` or ``http://host:port`` of the HTTP server, as `dcs serve` prints it.
        token: the coordinator's.
        timeout: seconds that an answer may take.

    Attributes:
        url: of the root.

    Raises `DcsError` when the address cannot be one.
    """

    def __init__(self, address: str, token: str | None = None, timeout: float = 3.0) -> None:
        if not 0 < timeout < math.inf:
            raise DcsError(f"timeout is {timeout}; it must be a positive number of seconds")
        self.url = _root(address)
        self._timeout = timeout
        self._headers = {"Accept": "application/json"}
        if token is not None:  # header values are bytes, written as latin-1
            self._headers["Authorization"] = f"Bearer {token.encode().decode('latin-1')}"
        self._open = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), _NoRedirects()  # the token goes nowhere else
        ).open  # fmt: skip

    def read(self) -> Reading:
        """The topology now.

        Raises:
            CoordinatorLost, Timeout: no answer (`GONE`); the next call tries again.
            Unauthorized: the token is missing or wrong.
            ProtocolError: what answers is no coordinator, or one of another release.
        """
        request = urllib.request.Request(f"{self.url}/topology", headers=self._headers)
        try:
            with self._open(request, timeout=self._timeout) as response:
                body = response.read(_MOST_BYTES)
        except urllib.error.HTTPError as error:
            with error:
                raise self._refused(error.code, error.read(512)) from error
        except TimeoutError as error:
            raise self._too_late() from error
        except urllib.error.URLError as error:
            if isinstance(error.reason, TimeoutError):
                raise self._too_late() from error
            raise CoordinatorLost(
                f"nothing answers at {self.url} ({error.reason}); is `dcs serve --http-port` running there?"
            ) from error
        except http.client.HTTPException as error:
            raise ProtocolError(self._unreadable(repr(error))) from error
        except OSError as error:
            raise CoordinatorLost(f"{self.url} hung up: {error}") from error
        try:
            return Reading(time.monotonic(), msgspec.json.decode(body, type=Topology))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ProtocolError(self._unreadable(str(error))) from error

    def _refused(self, status: int, body: bytes) -> DcsError:
        said = body.decode("utf-8", "replace").strip()
        if status == 401:
            return Unauthorized(f"{self.url} wants another token; set DCS_TOKEN to the coordinator's")
        if status == 503:
            return CoordinatorLost(f"the coordinator behind {self.url} does not answer: {said}")
        return ProtocolError(self._unreadable(f"status {status}, {said[:200]!r}"))

    def _too_late(self) -> Timeout:
        return Timeout(f"{self.url} did not answer within {self._timeout} s")

    def _unreadable(self, what: str) -> str:
        return (
            f"what answers at {self.url} is not the HTTP server of a dcs coordinator of this release: {what}"
        )


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Makes an error of a redirection."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> None:
        return None


def _root(address: str) -> str:
    if address.startswith("tcp://"):
        raise DcsError(
            f"{address} is where members reach the coordinator; give the HTTP address, which"
            " `dcs serve --http-port PORT` prints"
        )
    url = address if "://" in address else f"http://{address}"
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname is not None and parts.port != 0
    except ValueError:
        usable, parts = False, urlsplit("")
    if not usable:
        raise DcsError(f"{address!r} is no address of an HTTP server; give HOST:PORT or http://HOST:PORT")
    return f"{parts.scheme}://{parts.netloc}"
