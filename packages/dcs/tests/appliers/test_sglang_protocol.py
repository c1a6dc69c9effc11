"""The calls of one version to SGLang, and what is done when one fails; a stand-in answers over real HTTP.

tests/engines in the workspace has the real server.
"""

import base64
import functools
import io
import pickle
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import dcs
import pytest
import torch
import torch.distributed as dist
from dcs.appliers import Prefixed, SglangApplier
from dcs.appliers.checkpoint import read
from torch.distributed.distributed_c10d import PrefixStore

in_band = functools.partial(SglangApplier, mode="tensor")

ALLOWED = {
    ("torch", "uint8"),
    ("torch", "bfloat16"),
    ("torch", "float32"),
    ("torch._utils", "_rebuild_tensor_v2"),
    ("collections", "OrderedDict"),
    ("types", "SimpleNamespace"),
}
"""What SGLang's unpickler lets through, as far as it is needed."""


class Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            return lambda data: torch.load(io.BytesIO(data), weights_only=True)
        assert (module, name) in ALLOWED, f"SGLang blocks {module}.{name}"
        return super().find_class(module, name)


class FakeSglang:
    """Follows the rules that SGLang 0.5.23 has for sessions and pauses, and keeps the weights it is sent."""

    def __init__(self, calls: Any, tp_size: int = 1) -> None:
        self.calls = calls
        self.url: str = calls.url
        self.weights: dict[str, torch.Tensor] = {}
        self.version: str | None = None
        self.paused = self.session = False
        self.payloads = 0
        self.group: Any = None
        calls.answers |= {
            "/server_info": lambda _body: (200, {"tp_size": tp_size, "pp_size": 1, "dp_size": 1}),
            "/model_info": lambda _body: (200, {"model_path": "org/model"}),
            "/pause_generation": lambda _body: self._set(paused=True),
            "/continue_generation": lambda _body: self._set(paused=False),
            "/begin_weight_update": lambda _body: self._begin(),
            "/end_weight_update": lambda _body: self._set(session=False),
            "/update_weights_from_tensor": self._take,
            "/update_weights_from_disk": self._load,
        }

    def _set(self, **state: bool) -> tuple[int, Any]:
        self.__dict__ |= state
        return 200, {"success": True}

    def _begin(self) -> tuple[int, Any]:
        if self.session:
            return 400, {"message": "a weight-update session is already open; call end_weight_update() first"}
        return self._set(session=True)

    def _take(self, body: Any) -> tuple[int, Any]:
        assert self.session
        assert self.paused
        assert body["load_format"] == "flattened_bucket"
        assert body["flush_cache"] is False
        self.payloads = len(body["serialized_named_tensors"])
        for payload in body["serialized_named_tensors"]:
            content = Unpickler(io.BytesIO(base64.b64decode(payload, validate=True))).load()
            for meta in content["metadata"]:
                assert isinstance(meta, SimpleNamespace)
                assert meta.numel == meta.end_idx - meta.start_idx
                bits = content["flattened_tensor"][meta.start_idx : meta.end_idx]
                self.weights[meta.name] = bits.view(meta.dtype).reshape(meta.shape).clone()
        self.version = body["weight_version"] or self.version
        return 200, {"success": True}

    def _load(self, body: Any) -> tuple[int, Any]:
        assert self.paused
        self.weights = dict(read(f"{body['model_path']}/model.safetensors"))
        self.version = body["weight_version"]
        return 200, {"success": True}

    def holds(self, tensors: dict[str, torch.Tensor]) -> bool:
        same = self.weights.keys() == tensors.keys()
        return same and all(
            tensor.dtype == tensors[name].dtype and torch.equal(tensor, tensors[name])
            for name, tensor in self.weights.items()
        )


@pytest.fixture
def sglang(engine_server: Callable[[], Any]) -> Callable[..., FakeSglang]:
    return lambda **options: FakeSglang(engine_server(), **options)


def test_a_version_is_pushed_in_buckets_between_pause_and_continue(sglang, folder, weights, version) -> None:
    server = sglang()
    with in_band(server.url, model=folder, bucket_bytes=300) as applier:
        assert applier.layout == dcs.layout.of(weights(0))
        applier(version(5, weights(1)))
    assert server.holds(weights(1))
    assert server.version == "5"
    buckets = server.calls.paths.count("/update_weights_from_tensor")
    assert buckets > 3
    assert server.calls.paths == [
        "/pause_generation",
        "/begin_weight_update",
        *["/update_weights_from_tensor"] * buckets,
        "/end_weight_update",
        "/flush_cache",
        "/continue_generation",
    ]
    sent = [body for path, body in server.calls.log if path == "/update_weights_from_tensor"]
    assert [body["weight_version"] for body in sent] == [None] * (buckets - 1) + [
        "5"
    ]  # only when it is whole
    assert ("/pause_generation", {"mode": "retract"}) in server.calls.log
    assert applier.last is not None
    assert applier.last.nbytes == sum(tensor.nbytes for tensor in weights(1).values())
    assert 0 < applier.last.pause_seconds <= applier.last.seconds


def test_each_rank_of_a_server_gets_a_payload(sglang, folder, weights, version) -> None:
    server = sglang(tp_size=3)
    in_band(server.url, model=folder)(version(1, weights(1)))
    assert server.payloads == 3
    assert server.holds(weights(1))


@pytest.mark.parametrize(
    ("pause", "flush"),
    [("abort", ["/flush_cache?timeout=30.0"]), ("retract", ["/flush_cache"]), ("in_place", [])],
)
def test_the_cache_of_the_old_weights_is_flushed_unless_requests_keep_it(
    pause, flush, sglang, folder, weights, version
) -> None:
    server = sglang()
    in_band(server.url, model=folder, pause=pause)(version(1, weights(1)))
    assert [path for path, _ in server.calls.log if "flush" in path] == flush
    assert ("/pause_generation", {"mode": pause}) in server.calls.log


def test_disk_mode_writes_a_folder_and_removes_it(sglang, folder, weights, version, tmp_path) -> None:
    server = sglang()
    shared = tmp_path / "shared"
    shared.mkdir()
    with in_band(server.url, model=folder, mode="disk", directory=shared) as applier:
        applier(version(1, weights(1)))
        assert server.holds(weights(1))
        assert len(list(shared.iterdir())) == 1
    applier.close()
    assert list(shared.iterdir()) == []


def test_what_does_not_fit_is_refused_without_a_word_to_the_server(sglang, folder, weights, version) -> None:
    server = sglang()
    applier = in_band(server.url, model=folder)
    asked = len(server.calls.log)
    with pytest.raises(dcs.LayoutMismatch, match=r"'model\.norm\.weight' of version 1 is bfloat16\[9\]"):
        applier(version(1, weights(1) | {"model.norm.weight": torch.zeros(9).bfloat16()}))
    assert len(server.calls.log) == asked
    assert applier.usable


@pytest.mark.parametrize("path", ["/pause_generation", "/begin_weight_update"])
def test_an_error_before_the_first_bucket_leaves_a_server_that_serves_on(
    path, sglang, folder, weights, version
) -> None:
    server = sglang()
    applier = in_band(server.url, model=folder)
    answer = server.calls.answers[path]
    server.calls.refuse(path, 503)
    with pytest.raises(dcs.ApplyFailed, match=f"{path} answered 503.*serves on as before"):
        applier(version(1, weights(1)))
    assert not server.paused
    assert not server.weights
    server.calls.answers[path] = answer
    applier(version(2, weights(2)))
    assert server.holds(weights(2))


@pytest.mark.parametrize(
    "path", ["/update_weights_from_tensor", "/end_weight_update", "/flush_cache", "/continue_generation"]
)
def test_an_error_after_the_first_bucket_leaves_the_server_paused(
    path, sglang, folder, weights, version
) -> None:
    server = sglang()
    applier = in_band(server.url, model=folder)
    server.calls.refuse(path)
    with pytest.raises(dcs.ApplyFailed, match=f"half way.*left paused.*{path} answered 400"):
        applier(version(1, weights(1)))
    assert server.paused
    asked = len(server.calls.log)
    with pytest.raises(dcs.ApplyFailed, match="earlier version failed"):
        applier(version(2, weights(2)))
    assert len(server.calls.log) == asked
    assert applier.last is None


def test_a_new_applier_heals_what_a_dead_one_left_open(sglang, folder, weights, version) -> None:
    server = sglang()
    server.paused = server.session = True
    in_band(server.url, model=folder)(version(1, weights(1)))
    assert server.holds(weights(1))
    assert not server.paused
    assert not server.session


def test_a_server_that_is_gone_or_does_not_answer_is_said_to_be(sglang, folder, weights, version) -> None:
    with pytest.raises(dcs.ApplyFailed, match="was not answered"):
        in_band("http://127.0.0.1:9", model=folder)
    server = sglang()
    applier = in_band(server.url, model=folder, timeout_seconds=0.3)
    stuck = threading.Event()
    server.calls.answers["/update_weights_from_tensor"] = lambda _body: (200, {"waited": stuck.wait(10.0)})
    with pytest.raises(dcs.ApplyFailed, match=r"left paused.*was not answered: TimeoutError"):
        applier(version(1, weights(1)))
    stuck.set()


def test_servers_that_sglang_cannot_update_so_are_refused(sglang, folder) -> None:
    server = sglang()
    server.calls.answers["/server_info"] = lambda _body: (200, {"tp_size": 2, "pp_size": 1, "dp_size": 4})
    with pytest.raises(dcs.ApplyFailed, match="4 data-parallel ranks"):
        in_band(server.url, model=folder)
    in_band(server.url, model=folder, mode="disk").close()


@pytest.mark.parametrize(
    "wrong", [{"mode": "ipc"}, {"pause": "wait"}, {"mode": "distributed", "backend": "mpi"}]
)
def test_unknown_choices_are_named(wrong, sglang, folder) -> None:
    server = sglang()
    with pytest.raises(ValueError, match="it must be"):
        in_band(server.url, model=folder, **wrong)
    with pytest.raises(ValueError, match="must look like"):
        in_band("127.0.0.1:30000", model=folder)


def test_the_key_of_the_server_is_sent_and_its_folder_need_not_be_here(sglang, weights, version) -> None:
    server = sglang()
    with pytest.raises(dcs.LayoutMismatch, match="'org/model', which is no folder here"):
        in_band(server.url)
    names = Prefixed(published_prefix="actor.")
    published = {f"actor.{name}": tensor for name, tensor in weights(1).items()}
    applier = in_band(server.url, layout=dcs.layout.of(published), names=names, api_key="s3cret")
    applier(version(1, published))
    assert server.holds(weights(1))
    assert server.calls.headers["Authorization"] == "Bearer s3cret"


class Receiver:
    """Does what SGLang does about a distributed update: it joins the group and receives flat buckets."""

    def __init__(self, server: FakeSglang) -> None:
        self._server = server
        self._group: Any = None
        server.calls.answers |= {
            "/init_weights_update_group": self._join,
            "/update_weights_from_distributed": self._receive,
            "/destroy_weights_update_group": self._leave,
        }

    def _join(self, body: Any) -> tuple[int, Any]:
        patience = timedelta(seconds=20)
        store: Any = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
            body["master_address"], body["master_port"], is_master=False, timeout=patience
        )
        for prefix in (body["group_name"], f"{body['group_name']}/", "cpu/"):
            store = PrefixStore(prefix, store)
        assert (body["backend"], body["rank_offset"], body["world_size"]) == ("gloo", 1, 2)
        self._group = dist.ProcessGroupGloo(store, 1, 2, patience)
        return 200, {"success": True}

    def _leave(self, _body: Any) -> tuple[int, Any]:
        self._group = None
        return 200, {"success": True}

    def _receive(self, body: Any) -> tuple[int, Any]:
        assert body["load_format"] == "flattened_bucket"
        dtypes = [getattr(torch, dtype) for dtype in body["dtypes"]]
        sizes = [
            torch.Size(shape).numel() * d.itemsize for shape, d in zip(body["shapes"], dtypes, strict=True)
        ]
        flat = torch.empty(sum(sizes), dtype=torch.uint8)
        self._group.broadcast([flat], dist.BroadcastOptions()).wait()
        for name, bits, dtype, shape in zip(
            body["names"], flat.split(sizes), dtypes, body["shapes"], strict=True
        ):
            self._server.weights[name] = bits.view(dtype).reshape(shape).clone()
        self._server.version = body["weight_version"] or self._server.version
        return 200, {"success": True}


def test_distributed_mode_broadcasts_buckets_in_a_group_of_its_own(sglang, folder, weights, version) -> None:
    server = sglang()
    Receiver(server)
    with in_band(server.url, model=folder, mode="distributed", bucket_bytes=300) as applier:
        for number in (1, 2):
            applier(version(number, weights(number)))
            assert server.holds(weights(number))
            assert server.version == str(number)
    assert not dist.is_initialized()
    assert server.calls.paths.count("/init_weights_update_group") == 1
    assert server.calls.paths[-1] == "/destroy_weights_update_group"


def test_a_distributed_update_that_is_refused_does_not_hang(sglang, folder, weights, version) -> None:
    server = sglang()
    Receiver(server)
    applier = in_band(server.url, model=folder, mode="distributed")
    applier(version(1, weights(1)))
    server.calls.refuse("/update_weights_from_distributed")
    began = time.monotonic()
    with pytest.raises(dcs.ApplyFailed, match="left paused"):
        applier(version(2, weights(2)))
    applier.close()
    assert time.monotonic() - began < 10.0


def test_a_server_that_does_not_join_the_group_serves_on(
    sglang, folder, weights, version, monkeypatch
) -> None:
    monkeypatch.setattr("dcs.appliers.sglang.applier._JOIN_SECONDS", 1.0)
    server = sglang()
    server.calls.refuse("/init_weights_update_group")
    applier = in_band(server.url, model=folder, mode="distributed")
    with pytest.raises(dcs.ApplyFailed, match=r"init_weights_update_group.*serves on as before"):
        applier(version(1, weights(1)))
    assert applier.usable
    assert "/pause_generation" not in server.calls.paths
