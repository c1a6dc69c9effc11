"""The calls of one version to vLLM; a stand-in with the real worker extension answers over real HTTP."""

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import dcs
import pytest
import torch
from dcs.appliers import VllmApplier
from dcs.appliers.vllm_worker import DcsWorkerExtension


class Model:
    """As much of a vLLM model as the extension uses."""

    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] = {}

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        self.weights = dict(weights)
        return set(self.weights)


class FakeVllm:
    """Two workers that have the extension."""

    def __init__(self, calls: Any, folder: object) -> None:
        self.calls = calls
        self.url: str = calls.url
        self.models = [Model(), Model()]
        calls.answers |= {
            "/v1/models": lambda _body: (200, {"data": [{"id": "m", "root": str(folder)}]}),
            "/collective_rpc": self._call,
        }

    def _call(self, body: Any) -> tuple[int, Any]:
        results = []
        for model in self.models:
            worker = DcsWorkerExtension()
            worker.model_runner = SimpleNamespace(model=model)
            results.append(getattr(worker, body["method"])(**body["kwargs"]))
        return 200, {"results": results}


@pytest.fixture
def vllm(engine_server: Callable[[], Any], folder) -> FakeVllm:
    return FakeVllm(engine_server(), folder)


def test_a_version_is_loaded_by_every_worker_between_pause_and_resume(
    vllm, weights, version, tmp_path
) -> None:
    with VllmApplier(vllm.url, directory=tmp_path) as applier:
        assert applier.layout == dcs.layout.of(weights(0))
        applier(version(3, weights(1)))
        assert applier.last is not None
        assert applier.last.version == 3
    for model in vllm.models:
        assert model.weights.keys() == weights(1).keys()
        assert all(torch.equal(model.weights[name], tensor) for name, tensor in weights(1).items())
    assert [path for path, body in vllm.calls.log if body is not None] == [
        "/pause?mode=keep",
        "/collective_rpc",
        "/reset_prefix_cache?reset_running_requests=true",
        "/resume",
    ]
    assert not list(tmp_path.glob("dcs-vllm-*"))


def test_what_does_not_fit_is_refused_without_a_word_to_the_server(vllm, weights, version) -> None:
    with VllmApplier(vllm.url) as applier:
        asked = len(vllm.calls.log)
        with pytest.raises(dcs.LayoutMismatch, match="absent"):
            applier(version(1, {"model.norm.weight": torch.zeros(8).bfloat16()}))
        assert len(vllm.calls.log) == asked
        assert applier.usable


def test_an_error_before_loading_leaves_a_server_that_serves_on(vllm, weights, version) -> None:
    with VllmApplier(vllm.url) as applier:
        vllm.calls.refuse("/pause", 500)
        with pytest.raises(dcs.ApplyFailed, match=r"/pause\?mode=keep answered 500.*serves on as before"):
            applier(version(1, weights(1)))
        assert vllm.calls.paths[-1] == "/resume"
        assert applier.usable


def test_an_error_while_loading_leaves_the_server_paused(vllm, weights, version) -> None:
    with VllmApplier(vllm.url) as applier:
        vllm.calls.answers["/collective_rpc"] = lambda _body: (200, {"results": [{"version": 1}, "None"]})
        with pytest.raises(dcs.ApplyFailed, match=r"left paused.*worker-extension-cls"):
            applier(version(1, weights(1)))
        assert "/resume" not in vllm.calls.paths
        with pytest.raises(dcs.ApplyFailed, match="earlier version failed"):
            applier(version(2, weights(2)))
