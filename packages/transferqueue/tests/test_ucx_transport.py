"""The ucx transport of clients: through a real store where ucxx is installed, its refusals everywhere."""

import importlib.util

import numpy as np
import pytest
import transferqueue as tq


@pytest.fixture
def loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """UCX over the loopback device only, in this process and in those of the store."""
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    monkeypatch.setenv("UCX_TLS", "tcp,self")


def test_a_store_that_does_not_offer_ucx_is_reached_by_zmq_with_the_reason() -> None:
    with tq.serve(1, token="secret") as server, tq.connect(server, transport="ucx") as queue:
        assert queue.transport == "zmq"
        assert "ucx=True" in " ".join(queue.transport_notes)
        part = queue.partition("p", tasks={"t": ["x"]})
        part.put({"x": np.arange(3)})
        assert part.fetch("t", 3)["x"].values.tolist() == [0, 1, 2]


def test_ucx_wants_a_token() -> None:
    with pytest.raises(tq.InvalidArgument, match="token"):
        tq.serve(1, ucx=True)


@pytest.mark.skipif(importlib.util.find_spec("ucxx") is not None, reason="ucxx is installed")
def test_without_ucxx_the_store_goes_on_and_says_why(capfd: pytest.CaptureFixture[str]) -> None:
    with tq.serve(1, token="secret", ucx=True) as server, tq.connect(server, transport="ucx") as queue:
        assert queue.transport == "zmq"
    assert "relax-transferqueue[ucx]" in capfd.readouterr().err


@pytest.mark.skipif(importlib.util.find_spec("ucxx") is None, reason="ucxx is not installed: extra [ucx]")
def test_large_payload_goes_by_ucx_and_small_by_zmq(loopback: None) -> None:
    with (
        tq.serve(2, token="secret", ucx=True) as server,
        tq.connect(server, transport="ucx") as queue,
        tq.connect(server) as local,
    ):
        assert (queue.transport, queue.transport_notes) == ("ucx", ())
        part = queue.partition("p", tasks={"t": ["x"]})
        rows = np.random.default_rng(0).standard_normal((8, 400_000)).astype(np.float32)
        for start in range(0, 8, 4):
            part.put({"x": rows[start : start + 4]})
        part.put({"x": rows[:1, :8]})
        mine = part.fetch("t", 9)
        assert (mine.fields["x"][0] == rows[0]).all()
        ids = mine.ids
        assert all((row == rows[at]).all() for at, row in enumerate(part.get(ids[:8])["x"]))
        assert (local.partition("p").get(ids[:4])["x"].values.reshape(4, -1) == rows[:4]).all()
        part.update(ids[:4], {"y": rows[4:]})
        assert (part.get(ids[:4], ["y"])["y"].values.reshape(4, -1) == rows[4:]).all()
        mine.ack()
