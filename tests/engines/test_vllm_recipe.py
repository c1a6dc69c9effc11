"""The recipe for vLLM follows a run; vLLM is a stand-in that has the real worker extension."""

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dcs
import pytest
import torch
from dcs.appliers.checkpoint import write
from dcs.appliers.vllm_worker import DcsWorkerExtension

RECIPE = Path(__file__).parents[2] / "recipes" / "dcs_vllm.py"


class FakeVllm(ThreadingHTTPServer):
    """One worker, whose weights are in `weights`."""

    def __init__(self, model_folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.model_folder = model_folder
        self.weights: dict[str, torch.Tensor] = {}

    def answer(self, path: str, body: Any) -> Any:
        if path == "/v1/models":
            return {"data": [{"id": "tiny", "root": str(self.model_folder)}]}
        if path == "/collective_rpc":
            worker = DcsWorkerExtension()
            worker.model_runner = SimpleNamespace(model=SimpleNamespace(load_weights=self.weights.update))
            return {"results": [getattr(worker, body["method"])(**body["kwargs"])]}
        return {}


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.do_POST()

    def do_POST(self) -> None:
        assert isinstance(self.server, FakeVllm)
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"null")
        text = json.dumps(self.server.answer(self.path.split("?")[0], body)).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


@pytest.fixture
def vllm(tmp_path: Path) -> Iterator[FakeVllm]:
    write(tmp_path / "model.safetensors", {"w": torch.zeros(3)})
    with FakeVllm(tmp_path) as server:
        serving = threading.Thread(target=server.serve_forever, args=(0.02,))
        serving.start()
        yield server
        server.shutdown()
        serving.join()


def test_the_recipe_follows_until_it_is_told_to_end(vllm: FakeVllm) -> None:
    tensors = {"w": torch.zeros(3)}
    with (
        dcs.Coordinator() as coordinator,
        dcs.Publisher(coordinator.address, run="r", layout=dcs.layout.of(tensors)) as publisher,
    ):
        publisher.publish(0, tensors)
        url = f"http://127.0.0.1:{vllm.server_address[1]}"
        command = [sys.executable, str(RECIPE), str(coordinator.address), "r", url]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as recipe:
            assert recipe.stdout is not None
            for version in range(3):
                if version:
                    publisher.publish(version, {"w": torch.full((3,), float(version))})
                assert recipe.stdout.readline().startswith(f"version {version}: Applied")
                assert vllm.weights["w"].tolist() == [float(version)] * 3
            recipe.send_signal(signal.SIGINT)
            assert recipe.wait(30) == 0
