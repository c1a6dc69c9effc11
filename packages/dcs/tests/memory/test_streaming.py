"""The copy past the caches gives the bytes that torch gives, and touches no other."""

from pathlib import Path

import numpy as np
import pytest
import torch
from dcs import compiled
from dcs.layout import of
from dcs.memory import streaming
from dcs.memory.arena import Arena

MARGIN = 4096


@pytest.fixture
def loop() -> streaming.Streaming:
    found = streaming.loaded()
    assert found is not None, "this environment was installed without the compiled loop"
    return found


@pytest.mark.parametrize("nbytes", [0, 1, 63, 64, 127, 128, 191, 4095, 32767, 32768, 32769, 100_003])
@pytest.mark.parametrize(("ahead", "behind"), [(0, 0), (1, 0), (0, 3), (17, 61), (63, 63), (64, 8)])
def test_every_byte_of_the_range_and_none_beside_it(
    loop: streaming.Streaming, nbytes: int, ahead: int, behind: int
) -> None:
    random = np.random.default_rng(nbytes)
    source = random.integers(0, 256, nbytes + 2 * MARGIN, np.uint8)
    target = random.integers(0, 256, nbytes + 2 * MARGIN, np.uint8)
    expected = target.copy()
    expected[MARGIN + ahead : MARGIN + ahead + nbytes] = source[MARGIN + behind : MARGIN + behind + nbytes]
    loop.block(
        target[MARGIN + ahead : MARGIN + ahead + nbytes], source[MARGIN + behind : MARGIN + behind + nbytes]
    )
    np.testing.assert_array_equal(target, expected)


def _mixture() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Sources of every kind, and targets of the same shapes: more than `WORTH_BYTES`."""
    torch.manual_seed(0)
    sources = {
        "large": torch.randn(3_000_000),
        "odd": torch.randn(12_347).to(torch.bfloat16),
        "empty": torch.empty(0, 3),
        "one": torch.tensor(3.5),
        "turned": torch.randn(300, 200).t(),
        "other dtype": torch.randn(1000, dtype=torch.float64),
        "expanded": torch.randn(1, 50).expand(20, 50),
        "conjugate": torch.randn(64, dtype=torch.complex64).conj(),
        "inner": torch.randn(40, 40)[3:30, 5:9],
        "flags": torch.rand(77) > 0.5,
    }
    targets = {
        name: torch.zeros(tensor.shape, dtype=torch.float32 if name == "other dtype" else tensor.dtype)
        for name, tensor in sources.items()
    }
    targets["one"] = torch.zeros(9)[4]
    return sources, targets


@pytest.mark.parametrize("with_loop", [True, False])
def test_tensors_of_every_kind_arrive_as_by_torch(with_loop: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    sources, targets = _mixture()
    expected = {name: target.clone().copy_(sources[name]) for name, target in targets.items()}
    if not with_loop:
        monkeypatch.setattr(streaming, "loaded", lambda: None)
    streaming.copy((targets[name], tensor) for name, tensor in sources.items())
    for name, target in targets.items():
        assert torch.equal(target, expected[name]), name


def test_what_differs_in_shape_is_left_to_torch() -> None:
    target, source = torch.zeros(4, 3_000_000), torch.randn(3_000_000)
    assert not streaming.is_plain(target, source)
    streaming.copy([(target, source)])
    assert all(torch.equal(row, source) for row in target)


def test_hashes_are_those_of_the_bytes_that_lie_there(monkeypatch: pytest.MonkeyPatch) -> None:
    sources, _ = _mixture()
    layout = of({name: tensor.resolve_conj() for name, tensor in sources.items() if not tensor.is_complex()})
    tensors = {name: tensor for name, tensor in sources.items() if not tensor.is_complex()}
    arena, plain = Arena(layout), Arena(layout)
    assert arena.nbytes >= streaming.WORTH_BYTES
    hashes = arena.fill(tensors, 1 << 20)
    monkeypatch.setattr(streaming, "loaded", lambda: None)
    assert hashes == plain.fill(tensors, 1 << 20)
    np.testing.assert_array_equal(arena.flat, plain.flat)
    arena.close()
    plain.close()


def test_an_installation_without_it_says_why(tmp_path: Path) -> None:
    damaged = tmp_path / "_streaming.so"
    assert compiled.load(damaged, "dcs_streaming_abi", 1) == (
        None,
        "this installation has no compiled kernel",
    )
    damaged.write_bytes(b"no library")
    library, why = compiled.load(damaged, "dcs_streaming_abi", 1)
    assert library is None
    assert "cannot be loaded" in why
    real = Path(streaming.__file__).with_name("_streaming.so")
    library, why = compiled.load(real, "dcs_streaming_abi", 99)
    assert library is None
    assert "another version" in why
