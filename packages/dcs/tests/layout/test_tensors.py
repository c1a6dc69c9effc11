"""Layouts: placement, equality, fingerprints, pieces, and what is refused."""

import dcs.layout
import msgspec
import pytest
import torch
from dcs.errors import LayoutMismatch
from dcs.layout import ALIGNMENT, ITEMSIZE, Layout, Piece, TensorSpec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

# The same examples everywhere, and no clock: the machine may be busy.
steady = settings(
    max_examples=50, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)

shapes = st.lists(st.integers(0, 9), max_size=4).map(tuple)


@st.composite
def tensor_specs(draw) -> TensorSpec:
    name = draw(st.text(st.characters(codec="utf-8"), min_size=1, max_size=12))
    shape = draw(shapes)
    pieces = ()
    if draw(st.booleans()):
        start = tuple(draw(st.integers(0, 3)) for _ in shape)
        whole = tuple(
            first + size + draw(st.integers(0, 2)) for first, size in zip(start, shape, strict=True)
        )
        pieces = (Piece(draw(st.sampled_from(["g", "h"])), whole, start, (0,) * len(shape), shape),)
    return TensorSpec(name, shape, draw(st.sampled_from(sorted(ITEMSIZE))), pieces)


layouts = st.lists(tensor_specs(), max_size=6, unique_by=lambda spec: spec.name).map(
    lambda found: Layout(tuple(sorted(found, key=lambda spec: spec.name)))
)


@steady
@given(layouts)
def test_tensors_are_aligned_in_order_and_do_not_overlap(layout):
    starts, nbytes = layout.offsets()
    end = 0
    for start, spec in zip(starts, layout.tensors, strict=True):
        assert start % ALIGNMENT == 0
        assert end <= start < end + ALIGNMENT
        end = start + spec.nbytes
    assert end == nbytes


@steady
@given(layouts)
def test_a_layout_survives_encoding_with_its_fingerprint(layout):
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(layout), type=Layout)
    assert decoded == layout
    assert decoded.fingerprint == layout.fingerprint


@steady
@given(layouts, layouts)
def test_fingerprints_and_mismatches_agree_with_equality(left, right):
    assert (left.fingerprint == right.fingerprint) == (left == right)
    error = dcs.layout.mismatch(left, right, "left")
    assert (error is None) == (left == right)
    if error is not None:
        assert error.got != error.expected
        assert {error.tensor} <= {spec.name for spec in (*left.tensors, *right.tensors)}


def test_a_mismatch_in_a_piece_that_is_not_shown_is_still_named():
    parts = [dcs.layout.shard(f"expert{index}", (8, 4), 0, 0, 2) for index in range(6)]
    other = [*parts[:5], dcs.layout.shard("expert5", (8, 4), 0, 1, 2)]
    left, right = (
        dcs.layout.of({"w": torch.empty(24, 4)}, pieces={"w": dcs.layout.concatenated(found)})
        for found in (parts, other)
    )
    error = dcs.layout.mismatch(left, right, "left")
    assert error is not None
    assert error.got == "expert5[0:4, 0:4] at [20, 0]"
    assert error.expected == "expert5[4:8, 0:4] at [20, 0]"


def test_a_fingerprint_is_computed_once():
    layout = dcs.layout.of({"w": torch.empty(3)})
    assert layout.fingerprint is layout.fingerprint


def test_a_layout_is_the_same_from_a_module_a_state_dict_and_pairs_in_any_order():
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    layout = dcs.layout.of(model)
    assert layout == dcs.layout.of(model.state_dict())
    assert layout == dcs.layout.of(reversed(list(model.state_dict().items())))
    assert layout == dcs.layout.of(model.to("meta"))
    assert TensorSpec("1.num_batches_tracked", (), "int64") in layout.tensors


def test_floating_tensors_travel_in_the_dtype_asked_for_and_others_in_their_own():
    tensors = {
        "double": torch.ones(2, dtype=torch.float64),
        "eighth": torch.ones(2).to(torch.float8_e4m3fn),
        "flag": torch.ones(2, dtype=torch.bool),
        "single": torch.ones(2),
        "steps": torch.ones((), dtype=torch.int64),
    }
    for dtype in (torch.bfloat16, "bfloat16"):
        layout = dcs.layout.of(tensors, dtype=dtype)
        assert [spec.dtype for spec in layout.tensors] == [
            "bfloat16",
            "float8_e4m3fn",
            "bool",
            "bfloat16",
            "int64",
        ]
    with pytest.raises(LayoutMismatch, match="'int8'"):
        dcs.layout.of(tensors, dtype=torch.int8)


def test_what_cannot_be_carried_is_named():
    for tensor in (torch.eye(3).to_sparse(), torch.empty(2, dtype=torch.bits8), torch.empty(0), None):
        if tensor is not None and tensor.numel() == 0:
            assert dcs.layout.of({"w": tensor}).tensors[0].nbytes == 0
            continue
        for dtype in (None, "bfloat16"):
            with pytest.raises(LayoutMismatch, match="'w'") as caught:
                dcs.layout.of([("w", tensor)], dtype=dtype)  # type: ignore[list-item]
            assert caught.value.tensor == "w"
    with pytest.raises(LayoutMismatch, match="twice"):
        dcs.layout.of([("w", torch.ones(1)), ("w", torch.ones(1))])
    with pytest.raises(LayoutMismatch, match="'v', which is none of the 1 tensors"):
        dcs.layout.of({"w": torch.ones(1)}, pieces={"v": dcs.layout.whole("v", (1,))})


@pytest.mark.parametrize(
    ("shape", "pieces", "fault"),
    [
        ((4, 4), [("g", (8, 4), (0, 0), (1, 0), (4, 4))], "reaches outside of it"),
        ((4, 4), [("g", (4,), (0,), (0,), (4,))], "has 1 dimensions there, the tensor has 2"),
        ((4,), [("g", (9,), (0,), (0,), (3,)), ("h", (9,), (0,), (2,), (2,))], "overlap"),
        ((), [("g", (), (), (), ()), ("h", (), (), (), ())], "overlap"),
        ((2, 4), [("g", (4,), (0,), (1, 0), (4,)), ("g", (4,), (0,), (1, 3), (1,))], "overlap"),
    ],
)
def test_pieces_that_do_not_fit_their_tensor_are_refused(shape, pieces, fault):
    with pytest.raises(LayoutMismatch, match=fault) as caught:
        dcs.layout.of({"w": torch.empty(shape)}, pieces={"w": [Piece(*piece) for piece in pieces]})
    assert caught.value.tensor == "w"


@pytest.mark.parametrize(
    "piece",
    [
        ("g", (4, 4), (1, 0), (0, 0), (4, 4)),  # outside of the global tensor
        ("g", (4, 4), (0,), (0, 0), (4, 4)),
        ("g", (4, 4), (0, 0), (0,), (4, 4)),
        ("g", (4, 4), (0, 0), (0, 0), (4,)),
    ],
)
def test_a_piece_is_a_box_of_its_global_tensor(piece):
    with pytest.raises(ValueError, match=r"'g'|g\["):
        Piece(*piece)
    encoded = msgspec.msgpack.encode(piece)
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(encoded, type=Piece)


def test_layouts_too_large_to_address_are_refused():
    with pytest.raises(ValueError, match=r"2\*\*48"):
        TensorSpec("w", (1 << 48,), "float32")
    with pytest.raises(ValueError, match=r"2\*\*48"):
        Layout(tuple(TensorSpec(name, (1 << 47,), "uint8") for name in "abc"))


def test_many_pieces_are_checked_in_little_time():
    parts = [dcs.layout.whole(f"expert{index}", (16, 8)) for index in range(8192)]
    pieces = dcs.layout.concatenated(parts)
    spec = TensorSpec("grouped", (8192 * 16, 8), "bfloat16", pieces)
    assert spec.pieces[-1].at == (8191 * 16, 0)
