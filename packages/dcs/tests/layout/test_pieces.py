"""Builders of pieces, against torch's own cuts."""

import pytest
import torch
from dcs.layout import Piece, chunk, concatenated, own_shape, shard, stacked, whole
from hypothesis import given, settings
from hypothesis import strategies as st

steady = settings(deadline=None, derandomize=True)


def assembled(pieces: tuple[Piece, ...], tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """The rank's own tensor, piece by piece; -1 where there is none."""
    own = torch.full(own_shape(pieces), -1)
    for piece in pieces:
        source = tensors[piece.source]
        assert tuple(source.shape) == piece.shape
        taken = source[tuple(slice(s, s + e) for s, e in zip(piece.start, piece.extent, strict=True))]
        where = tuple(slice(a, a + e) for a, e in zip(piece.at, piece.own_extent, strict=True))
        own[where] = taken.reshape(piece.own_extent)
    return own


@steady
@given(st.integers(0, 40), st.integers(1, 9))
def test_chunks_are_those_of_torch(length, size):
    expected = [len(part) for part in torch.arange(length).chunk(size)] if length else []
    expected += [0] * (size - len(expected))
    found = [chunk(length, rank, size) for rank in range(size)]
    assert [extent for _, extent in found] == expected
    assert [start for start, _ in found] == [sum(expected[:rank]) for rank in range(size)]


def test_a_rank_outside_of_the_group_is_refused():
    for rank in (-1, 2):
        with pytest.raises(ValueError, match="part"):
            chunk(4, rank, 2)
    with pytest.raises(ValueError, match="dimension 2 of 'w'"):
        shard("w", (4, 4), 2, 0, 2)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_a_shard_is_a_chunk_of_the_tensor(dim):
    tensor = torch.arange(70).view(7, 10)
    for rank, expected in enumerate(tensor.chunk(3, dim)):
        assert torch.equal(assembled(shard("w", (7, 10), dim, rank, 3), {"w": tensor}), expected)


def test_a_part_beyond_the_last_is_empty():
    pieces = shard("w", (2, 3), 0, 3, 4)
    assert own_shape(pieces) == (0, 3)
    assert pieces[0].size == 0


def test_fused_projections_are_concatenated_shards():
    q, k, v = (torch.arange(n * 4).view(n, 4) + 100 * n for n in (8, 4, 2))
    tensors = {"q": q, "k": k, "v": v}
    for rank in range(2):
        pieces = concatenated(
            [shard(name, tuple(tensor.shape), 0, rank, 2) for name, tensor in tensors.items()]
        )
        expected = torch.cat([tensor.chunk(2)[rank] for tensor in tensors.values()])
        assert torch.equal(assembled(pieces, tensors), expected)
    across = concatenated([whole("k", (4, 4)), (), whole("k", (4, 4))], dim=1)
    assert torch.equal(assembled(across, tensors), torch.cat([k, k], 1))


def test_grouped_experts_are_stacked():
    tensors = {f"{kind}{e}": torch.arange(6).view(2, 3) + 10 * e for kind in ("gate", "up") for e in range(3)}
    experts = [concatenated([whole(f"gate{e}", (2, 3)), whole(f"up{e}", (2, 3))]) for e in range(3)]
    expected = torch.stack([torch.cat([tensors[f"gate{e}"], tensors[f"up{e}"]]) for e in range(3)])
    assert torch.equal(assembled(stacked(experts), tensors), expected)


def test_an_own_tensor_of_no_pieces_has_no_shape():
    assert own_shape(()) == ()
    assert concatenated([(), ()]) == ()
