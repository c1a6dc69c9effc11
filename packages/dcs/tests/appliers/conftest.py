"""Versions made by hand, model folders, and a server that answers over real HTTP as it is told to."""

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from dcs.appliers.checkpoint import write


@dataclass(frozen=True)
class Handmade:
    """A version as an applier sees it."""

    version: int
    tensors: Mapping[str, torch.Tensor]
    epoch: int = 1


@pytest.fixture
def version() -> type[Handmade]:
    return Handmade


@pytest.fixture
def weights() -> Callable[[int], dict[str, torch.Tensor]]:
    """`weights(seed)` are the tensors of a small decoder, several dtypes among them."""

    def make(seed: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)

        def rand(*shape: int) -> torch.Tensor:
            return torch.rand(shape, generator=generator)

        tensors = {"model.embed_tokens.weight": rand(16, 8), "model.norm.weight": rand(8).bfloat16()}
        for layer in (0, 1):
            of = f"model.layers.{layer}"
            for part in ("q_proj", "k_proj", "v_proj"):
                tensors[f"{of}.self_attn.{part}.weight"] = rand(8, 8).bfloat16()
                tensors[f"{of}.self_attn.{part}.bias"] = rand(8)
            tensors[f"{of}.mlp.scale"] = (100 * rand(3)).to(torch.uint8)
        return tensors

    return make


@pytest.fixture
def folder(tmp_path: Path, weights: Callable[[int], dict[str, torch.Tensor]]) -> Path:
    """The model folder of `weights`."""
    write(tmp_path / "model.safetensors", weights(0))
    (tmp_path / "config.json").write_text(json.dumps({"tie_word_embeddings": True}))
    return tmp_path


@dataclass(eq=False)
class Calls:
    """A server that is told what to answer.

    Attributes:
        answers: by path; a function of the JSON body that gives a status and a JSON answer.
        log: (path with query, body) of every call so far.
        headers: of the newest call.
    """

    url: str
    answers: dict[str, Callable[[Any], tuple[int, Any]]] = field(default_factory=dict)
    log: list[tuple[str, Any]] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def paths(self) -> list[str]:
        """What was posted, in order."""
        return [path.split("?")[0] for path, body in self.log if body is not None]

    def refuse(self, path: str, status: int = 400) -> None:
        self.answers[path] = lambda _body: (status, {"success": False, "message": f"no {path} today"})


@pytest.fixture
def engine_server() -> Iterator[Callable[[], Calls]]:
    """`engine_server()` is a running `Calls`; what it has no answer for is answered with an empty object."""
    with ExitStack() as running:

        def start() -> Calls:
            server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
            server.daemon_threads = True
            calls = Calls(f"http://127.0.0.1:{server.server_address[1]}")
            server.calls = calls  # pyright: ignore[reportAttributeAccessIssue]
            thread = threading.Thread(target=server.serve_forever, args=(0.02,))
            thread.start()
            running.callback(thread.join)
            running.callback(server.server_close)
            running.callback(server.shutdown)
            return calls

        yield start


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self._answer(None)

    def do_POST(self) -> None:
        self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _answer(self, body: Any) -> None:
        calls: Calls = self.server.calls  # pyright: ignore[reportAttributeAccessIssue]
        calls.log.append((self.path, body))
        calls.headers = dict(self.headers)
        status, answer = calls.answers.get(self.path.split("?")[0], lambda _body: (200, {}))(body)
        text = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""
