"""Staging on a device, on the CPU here; scripts/gpu_check.sh does the same on a GPU."""

import dcs
import pytest
import torch
from dcs.errors import Closed
from dcs.memory.device import DeviceMirror

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")),
]


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {
        "b.bias": torch.randn(33, generator=generator),
        "a.weight": torch.randn(17, 5, generator=generator).to(torch.bfloat16),
        "c.scale": torch.randn((), generator=generator, dtype=torch.float64),
        "d.none": torch.empty(0, 4),
        "e.code": torch.randint(0, 255, (70,), generator=generator).to(torch.uint8),
    }


def flat_of(layout: dcs.layout.Layout, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    starts, nbytes = layout.offsets()
    flat = torch.zeros(nbytes, dtype=torch.uint8)
    for spec, start in zip(layout.tensors, starts, strict=True):
        raw = tensors[spec.name].contiguous().flatten().view(torch.uint8)
        flat[start : start + len(raw)] = raw
    return flat


@pytest.mark.parametrize("device", DEVICES)
def test_the_mirror_has_the_arenas_bytes_and_its_tensors(device):
    tensors = weights()
    layout = dcs.layout.of(tensors)
    host = flat_of(layout, tensors)
    mirror, reason = DeviceMirror.allocate(layout, device)
    assert reason == ""
    assert mirror is not None
    with mirror:
        for start in range(0, mirror.nbytes, 100):  # as chunks are verified
            mirror.copy(host, start, min(start + 100, mirror.nbytes))
        mirror.wait(10.0)
        assert torch.equal(mirror.flat.cpu(), host)
        assert list(mirror.tensors) == sorted(tensors)
        for name, tensor in tensors.items():
            assert mirror.tensors[name].dtype == tensor.dtype
            assert mirror.tensors[name].device.type == device
            assert torch.equal(mirror.tensors[name].cpu(), tensor)


@pytest.mark.parametrize("device", DEVICES)
def test_it_is_used_again_for_the_next_version(device):
    tensors = weights()
    layout = dcs.layout.of(tensors)
    host = flat_of(layout, tensors)
    mirror, _ = DeviceMirror.allocate(layout, device)
    assert mirror is not None
    with mirror:
        for version in range(3):
            host.add_(version)
            mirror.reuse()
            mirror.copy(host)
            mirror.wait(10.0)
            assert torch.equal(mirror.flat.cpu(), host)


def test_no_memory_is_a_reason_and_no_mirror():
    layout = dcs.layout.of({"huge": torch.empty(1 << 46, dtype=torch.uint8, device="meta")})
    mirror, reason = DeviceMirror.allocate(layout, "cpu")
    assert mirror is None
    assert str(1 << 46) in reason


def test_a_device_that_is_not_there_is_a_reason():
    layout = dcs.layout.of(weights())
    assert "mps" in DeviceMirror.allocate(layout, "mps")[1]
    if not torch.cuda.is_available():
        assert "no CUDA device" in DeviceMirror.allocate(layout, "cuda")[1]


def test_what_does_not_fit_is_refused_before_a_byte_is_copied():
    layout = dcs.layout.of(weights())
    mirror, _ = DeviceMirror.allocate(layout, "cpu")
    assert mirror is not None
    mirror.flat.zero_()
    with pytest.raises(ValueError, match="float32"):
        mirror.copy(torch.ones(mirror.nbytes))
    with pytest.raises(ValueError, match=str(mirror.nbytes)):
        mirror.copy(torch.ones(mirror.nbytes - 1, dtype=torch.uint8))
    with pytest.raises(ValueError, match="bytes 5 to 4"):
        mirror.copy(torch.ones(mirror.nbytes, dtype=torch.uint8), 5, 4)
    assert not mirror.flat.any()
    mirror.close()
    mirror.close()
    with pytest.raises(Closed):
        mirror.copy(torch.ones(mirror.nbytes, dtype=torch.uint8))


class Cudart:
    """Stands in for CUDA's registration, which needs a GPU."""

    def __init__(self, code: int) -> None:
        self.code, self.registered = code, []

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.registered.append(address)
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        self.registered.remove(address)
        return 0


@pytest.mark.parametrize("code", [0, 2])
def test_host_memory_is_registered_once_and_a_refusal_is_said(monkeypatch, code):
    cudart = Cudart(code)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: False)
    layout = dcs.layout.of(weights())
    mirror, _ = DeviceMirror.allocate(layout, "cpu")
    assert mirror is not None
    mirror._stream = object()  # type: ignore[assignment]  # as on a GPU
    monkeypatch.setattr(mirror, "wait", lambda seconds: None)
    host = torch.zeros(mirror.nbytes, dtype=torch.uint8)
    first, again = mirror.pin(host), mirror.pin(host)
    assert len(cudart.registered) == (2 if code else 1)  # writable, and then for reading only
    assert first == again == mirror.unpinned
    assert ("errors [2, 2]" in first) == bool(code)
    if not code:  # a member's arenas come and go: only the last few stay pinned
        others = [torch.zeros(mirror.nbytes, dtype=torch.uint8) for _ in range(5)]
        for other in others[:4]:
            mirror.pin(other)
        mirror.pin(host)
        mirror.pin(others[4])
        kept = [host, *others[1:]]
        assert sorted(cudart.registered) == sorted(tensor.data_ptr() for tensor in kept)
        for other in others:
            mirror.unpin(other)
    mirror.unpin(host)
    assert cudart.registered == ([host.data_ptr()] * 2 if code else [])
    mirror._stream = None
    mirror.close()
