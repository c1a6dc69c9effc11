"""The encoding, the bounds and the probe of CUDA-IPC loans; scripts/gpu_check.sh lends for real."""

import dcs
import msgspec
import pytest
import torch
from dcs.errors import DcsError, ProtocolError
from dcs.wire import ipc
from dcs.wire.machine import machine_id

LAYOUT = dcs.layout.of({"a": torch.empty(10), "b": torch.empty(3, 3)})
NBYTES = LAYOUT.offsets()[1]


def loan(**changes) -> ipc.Loan:
    values = {
        "place": ipc.Place(machine_id(), "GPU-1"),
        "layout": LAYOUT.fingerprint,
        "start": 512,
        "nbytes": NBYTES,
        "storage": b"h" * 65,
        "storage_offset": 2 << 20,
        "storage_bytes": 4096,
        "counter": b"/torch_1_2",
        "counter_offset": 3,
        "event": b"e" * 64,
        "wait": True,
    }
    return ipc.Loan(**(values | changes))


def test_a_loan_survives_the_socket():
    assert ipc.decode(ipc.encode(loan())) == loan()


@pytest.mark.parametrize(
    "changes",
    [
        {"start": 4096 - NBYTES + 1},
        {"start": -1},
        {"storage_bytes": 1 << 60},
        {"storage": b""},
        {"storage": b"h" * 5000},
        {"counter_offset": -3},
    ],
)
def test_a_loan_beyond_its_bounds_is_refused(changes):
    fields = msgspec.structs.asdict(loan()) | changes
    fields["place"] = msgspec.structs.asdict(fields["place"])
    with pytest.raises(ProtocolError, match="no CUDA-IPC loan"):
        ipc.decode(msgspec.msgpack.encode(fields))


def test_any_bytes_are_refused_by_name():
    whole = ipc.encode(loan())
    for body in (b"", b"\xc1", whole[:-1], whole + b"\x00", b"\x80\x05]\x94.", b"\x91" * 5000):
        with pytest.raises(ProtocolError):
            ipc.decode(body)


def test_a_loan_of_another_layout_is_refused_before_cuda_is_asked():
    other = dcs.layout.of({"a": torch.empty(11)})
    with pytest.raises(DcsError, match=other.fingerprint):
        ipc.borrow(loan(), other, "cuda")
    with pytest.raises(DcsError, match=f"needs {NBYTES}"):
        ipc.borrow(loan(nbytes=NBYTES - 1), LAYOUT, "cuda")


def test_a_cpu_has_nothing_to_lend():
    assert ipc.probe("cpu") == "cpu is no CUDA device"
    with pytest.raises(DcsError, match="no CUDA"):
        ipc.lend(torch.zeros(NBYTES, dtype=torch.uint8), LAYOUT)
    with pytest.raises(ValueError, match="float32"):
        ipc.lend(torch.zeros(NBYTES), LAYOUT)
    if not torch.cuda.is_available():
        assert ipc.probe("cuda") == "torch finds no CUDA device here"
        with pytest.raises(DcsError, match="no CUDA device"):
            ipc.borrow(loan(), LAYOUT, "cuda")


def test_the_probe_says_what_stands_in_the_way(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(ipc, "_uuid", lambda device: "GPU-1")
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    here = ipc.Place(machine_id(), "GPU-1")
    assert ipc.probe("cuda:0", here) == ""
    assert "another machine" in ipc.probe("cuda:0", ipc.Place("elsewhere", "GPU-1"))
    assert "GPU-2" in ipc.probe("cuda:0", ipc.Place(machine_id(), "GPU-2"))
    assert "does not exist" in ipc.probe("cuda:1")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64, expandable_segments: True")
    assert "expandable_segments" in ipc.probe("cuda:0", here)
