"""JSON over HTTP to an engine's own server, by the standard library; a connection a call, a deadline on
each.
"""

import http.client
import json
import ssl
from collections.abc import Iterable, Sequence
from typing import Any
from urllib.parse import urlsplit

from dcs.errors import ApplyFailed


class EngineServer:
    """Where an engine listens.

    Args:
        url: `http://host:port` or `https://...`; a path in it is put before every path that is called.
        api_key: sent as a bearer token.
        timeout_seconds: of a call that gives none.
    """

    def __init__(self, url: str, *, api_key: str | None = None, timeout_seconds: float = 300.0) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"url is {url!r}; it must look like http://127.0.0.1:30000")
        self.url = url.rstrip("/")
        self.host = parts.hostname
        self.port = parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._path = parts.path.rstrip("/")
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._timeout_seconds = timeout_seconds

    def get(self, path: str, timeout_seconds: float | None = None) -> Any:
        """The JSON that `GET path` answers; raises as `post`."""
        return self._call("GET", path, (), timeout_seconds)

    def post(self, path: str, body: object = None, timeout_seconds: float | None = None) -> Any:
        """The JSON (or else the text) that `POST path` answers.

        Raises `ApplyFailed` when the server cannot be reached, does not answer in time, or answers with an
        error.
        """
        return self._call("POST", path, (json.dumps({} if body is None else body).encode(),), timeout_seconds)

    def post_parts(self, path: str, parts: Sequence[bytes]) -> Any:
        """`post` of a JSON text that is given in parts, which need not be joined."""
        return self._call("POST", path, parts, None)

    def _call(self, method: str, path: str, parts: Sequence[bytes], timeout_seconds: float | None) -> Any:
        timeout = self._timeout_seconds if timeout_seconds is None else timeout_seconds
        what = f"{method} {self.url}{path}"
        if self._tls is None:
            connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout)
        else:
            connection = http.client.HTTPSConnection(self.host, self.port, timeout=timeout, context=self._tls)
        headers = dict(self._headers)
        body: Iterable[bytes] | None = None
        if parts:
            headers |= {
                "Content-Type": "application/json",
                "Content-Length": str(sum(len(part) for part in parts)),
            }
            body = iter(parts)
        try:
            connection.request(method, self._path + path, body, headers)
            answer = connection.getresponse()
            text = answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise ApplyFailed(f"{what} was not answered: {error!r}") from error
        finally:
            connection.close()
        if answer.status // 100 != 2:
            raise ApplyFailed(f"{what} answered {answer.status}: {text[:2000].decode(errors='replace')}")
        try:
            return json.loads(text) if text else None
        except ValueError:
            return text.decode(errors="replace")
