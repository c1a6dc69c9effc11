"""What goes in comes out: values -> plans -> frame -> columns."""

import contextlib
from typing import Any

import numpy as np
import pytest
import transferqueue as tq
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from msgspec.structs import replace
from transferqueue.values import frame
from transferqueue.values.columns import ColumnPlan, assemble, gather, lay_out, runs
from transferqueue.values.encode import plan_fields
from transferqueue.values.restoring import restore
from transferqueue.values.spec import CONTAINERS, ITEMS, NUMERIC, Kind, Nesting

DTYPES = st.sampled_from(sorted(NUMERIC))


def through_a_frame(rows: int, plans: dict[str, ColumnPlan]) -> dict[str, tq.Column]:
    header, payload = frame.encode(rows, plans)
    return frame.decode(header, payload.tobytes())


def equal(got: Any, expected: Any) -> bool:
    if isinstance(expected, np.ndarray):
        return (
            got.dtype == expected.dtype
            and got.shape == expected.shape
            and got.tobytes() == expected.tobytes()
        )
    return got == expected or (got != got and expected != expected)


@st.composite
def arrays(draw: st.DrawFn, rows: int) -> list[Any]:
    """Ragged rows of one dtype and trailing shape."""
    dtype = draw(DTYPES)
    trailing = draw(st.sampled_from([(), (2,), (0,), (3, 2)]))
    return [draw(hnp.arrays(dtype, (draw(st.integers(0, 4)), *trailing))) for _ in range(rows)]


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def columns(draw: st.DrawFn, rows: int) -> list[Any]:
    one = draw(
        st.sampled_from(
            [
                arrays(rows),
                st.lists(st.integers(-(2**63), 2**63 - 1), min_size=rows, max_size=rows),
                st.lists(st.floats(), min_size=rows, max_size=rows),
                st.lists(st.booleans(), min_size=rows, max_size=rows),
                st.lists(st.text(max_size=5), min_size=rows, max_size=rows),
                st.lists(st.binary(max_size=5), min_size=rows, max_size=rows),
                st.lists(
                    st.dictionaries(st.text(max_size=3), PLAIN, max_size=3), min_size=rows, max_size=rows
                ),
            ]
        )
    )
    values = draw(one)
    missing = draw(st.lists(st.sampled_from([False, False, True]), min_size=rows, max_size=rows))
    return [None if gone else value for value, gone in zip(values, missing, strict=True)]


@settings(deadline=None)
@given(st.data(), st.integers(0, 6), st.integers(1, 4))
def test_any_rows_survive(data: st.DataObject, rows: int, fields: int) -> None:
    values = {f"f{i}": data.draw(columns(rows)) for i in range(fields)}
    count, plans = plan_fields(values)
    assert count == rows
    decoded = through_a_frame(rows, plans)
    assert decoded.keys() == values.keys()
    for name, expected in values.items():
        column = decoded[name]
        assert len(column) == rows
        assert all(equal(got, want) for got, want in zip(column, expected, strict=True))
        assert not column.values.flags.writeable
        assert column.lengths.sum() <= len(column.values) or column.spec.scalar


@settings(deadline=None)
@given(st.data(), st.integers(1, 6))
def test_any_selection_of_rows_survives(data: st.DataObject, rows: int) -> None:
    """As storage and clients pick rows from several frames, some of them shared, some without any value."""
    kind = data.draw(st.sampled_from(["plain", "shared"]))
    first = data.draw(columns(rows))
    if kind == "shared":
        index = data.draw(st.lists(st.none() | st.integers(0, rows - 1), min_size=rows, max_size=rows))
        count, plans = plan_fields({}, {"f": (first, index)})
        first = [None if at is None else first[at] for at in index]
    else:
        count, plans = plan_fields({"f": first})
    sources = [
        (through_a_frame(count, plans)["f"], first),
        (through_a_frame(2, plan_fields({"f": [None, None]})[1])["f"], [None, None]),
    ]
    picks = data.draw(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 5)), max_size=8))
    picked = [(sources[which][0], row % len(sources[which][1])) for which, row in picks]
    expected = [sources[which][1][row % len(sources[which][1])] for which, row in picks]
    plan = gather(list(runs(picked)))
    for column in (lay_out(plan), through_a_frame(len(picks), {"f": plan})["f"]):
        assert len(column) == len(expected)
        assert all(equal(got, want) for got, want in zip(column, expected, strict=True))
        if column.spec.dtype != "none":
            spread = column.expand()
            assert all(equal(got, want) for got, want in zip(spread, expected, strict=True))
            assert len(spread.offsets) == len(expected) + 1


@settings(deadline=None)
@given(st.data(), st.integers(1, 5))
def test_assembled_runs_are_the_concatenation(data: st.DataObject, rows: int) -> None:
    """Rows, lengths and slices come from the pieces; the arrays from one layout, which changes no row."""
    first = data.draw(columns(rows))
    index = data.draw(st.lists(st.none() | st.integers(0, rows - 1), min_size=rows, max_size=rows))
    shared = data.draw(st.booleans())
    plans = plan_fields({}, {"f": (first, index)})[1] if shared else plan_fields({"f": first})[1]
    values = [None if at is None else first[at] for at in index] if shared else first
    sources = [
        (through_a_frame(rows, plans)["f"], values),
        (through_a_frame(2, plan_fields({"f": [None, None]})[1])["f"], [None, None]),
    ]
    pieces, expected = [], []
    for _ in range(data.draw(st.integers(0, 4))):
        column, rows_of = sources[data.draw(st.integers(0, 1))]
        start = data.draw(st.integers(0, len(rows_of)))
        stop = data.draw(st.integers(start, len(rows_of)))
        pieces.append((column, start, stop))
        expected += rows_of[start:stop]
    column = assemble(pieces, len(expected))
    start = data.draw(st.integers(0, len(expected)))
    stop = data.draw(st.integers(start, len(expected)))
    part, wanted = column.slice(start, stop), expected[start:stop]
    nested = assemble([(column, start, stop), (column, 0, len(expected))], stop - start + len(expected))
    for got, want in ((part, wanted), (column, expected), (nested, wanted + expected)):
        assert len(got) == len(want)
        lengths = got.lengths
        assert all(equal(a, b) for a, b in zip(got, want, strict=True))
        whole = lay_out(gather([(got, 0, len(got))]))
        assert all(equal(a, b) for a, b in zip(whole, want, strict=True))
        assert lengths.tolist() == whole.lengths.tolist()
        assert len(got.offsets) == got.stored + 1
        assert got.valid is None or len(got.valid) == got.stored
        assert not got.values.flags.writeable
    with pytest.raises(tq.InvalidArgument, match="rows together"):
        assemble(pieces, len(expected) + 1)


def test_one_run_is_a_view_and_several_are_laid_out_once() -> None:
    column = through_a_frame(4, plan_fields({"f": [np.arange(i) for i in range(4)]})[1])["f"]
    part = assemble([(column, 1, 3)], 2)
    assert np.shares_memory(part.values, column.values)
    both = assemble([(column, 2, 4), (column, 0, 2)], 4)
    assert np.shares_memory(both[1], column.values)
    assert both.values is both.values
    assert both.values.tolist() == [0, 1, 0, 1, 2, 0]
    shared = through_a_frame(3, plan_fields({}, {"f": ([np.arange(9)], [0, None, 0])})[1])["f"]
    twice = assemble([(shared, 0, 3), (shared, 0, 3)], 6)
    assert twice.stored == 1
    assert len(twice.values) == 9


@settings(deadline=None)
@given(dtype=DTYPES, shape=st.lists(st.integers(0, 3), min_size=1, max_size=4))
def test_stacked_arrays_survive(dtype: str, shape: list[int]) -> None:
    array = np.arange(np.prod(shape, dtype=int)).astype(dtype).reshape(shape)
    column = through_a_frame(shape[0], plan_fields({"f": array})[1])["f"]
    assert [row.tolist() for row in column] == [row.tolist() for row in array]
    assert column.spec.trailing == tuple(shape[2:])
    big = array.astype(array.dtype.newbyteorder(">"))
    assert equal(
        through_a_frame(shape[0], plan_fields({"f": big[..., ::-1]})[1])["f"].values.ravel(),
        array[..., ::-1].ravel(),
    )


@settings(deadline=None)
@given(st.data())
def test_changed_bytes_are_refused(data: st.DataObject) -> None:
    header, payload = frame.encode(*plan_fields({"a": [np.arange(3), np.arange(2)], "b": ["x", None]}))
    at = data.draw(st.integers(0, len(payload) - 1))
    payload[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(tq.Corrupt):
        frame.decode(header, payload.tobytes())


COUNTS = st.integers(-1, 9) | st.sampled_from([1 << 31, 1 << 40, 1 << 62])
SIZES = st.lists(COUNTS, max_size=3).map(tuple)
SPECS = st.builds(
    tq.FieldSpec,
    st.sampled_from(["int8", "data", "str", "x", "bool", "float64", "bfloat16"]),
    SIZES,
    st.booleans(),
)
KINDS = st.builds(
    Kind,
    st.sampled_from([*sorted(CONTAINERS), "x"]),
    st.sampled_from([*sorted(ITEMS), "x"]),
    st.just(1) | COUNTS,
    st.just(0) | COUNTS,
)
FALSEHOODS = {
    "spec": SPECS,
    "total": COUNTS,
    "stored": COUNTS,
    "has_valid": st.booleans(),
    "shared": st.booleans(),
    "length": st.none() | COUNTS,
    "kind": KINDS,
    "nesting": st.builds(Nesting, SIZES, SIZES),
}


@settings(deadline=None)
@given(st.data())
def test_a_false_description_is_refused_or_harmless(data: st.DataObject) -> None:
    """Whatever a peer claims about its bytes, reading every row stays within them."""
    rows, plans = plan_fields(
        {"a": [np.arange(3), None], "c": [b"12", b"345"], "d": {"e": np.ones((2, 3), "f4")}},
        {"s": ([b"image"], [0, None]), "v": ([np.ones((2, 1)), np.ones((1, 2))], [1, 0])},
    )
    header, payload = frame.encode(rows, plans)
    columns = list(header.columns)
    for at, name in data.draw(
        st.lists(st.tuples(st.integers(0, 4), st.sampled_from(list(FALSEHOODS))), max_size=4)
    ):
        columns[at] = replace(columns[at], **{name: data.draw(FALSEHOODS[name])})
    claimed_rows = data.draw(st.just(rows) | COUNTS)
    claimed = frame.FrameHeader(claimed_rows, columns, header.checksum)
    noise = bytearray(payload.tobytes())
    for at in data.draw(st.lists(st.integers(0, len(noise) - 1), max_size=2)):
        noise[at] = data.draw(st.integers(0, 255))
    try:
        decoded = frame.decode(claimed, bytes(noise), verify=False)
    except tq.Corrupt:
        return
    for column in decoded.values():
        assert len(column) == claimed.rows
        assert column.offsets[-1] <= len(column.values)
        assert len(column.lengths) == claimed.rows
        with contextlib.suppress(tq.Corrupt):  # whether text is text shows when it is read
            column.tolist()
        with contextlib.suppress(tq.QueueError):  # or a package is needed
            column.restore()
            restore({name: column.expand() for name, column in decoded.items()})


def test_a_frame_is_aligned_and_copied_once() -> None:
    rows = [np.arange(5, dtype=np.int8), np.arange(3, dtype=np.int8)]
    header, payload = frame.encode(*plan_fields({"a": rows, "b": np.arange(2.0)}))
    assert payload[:8].tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert payload[64:88].view(np.int64).tolist() == [0, 5, 8]
    assert payload[128:144].view(np.float64).tolist() == [0, 1]
    assert len(payload) == 192
    decoded = frame.decode(header, payload)
    assert all(np.shares_memory(column.values, payload) for column in decoded.values())


def test_nested_fields_flatten() -> None:
    _, plans = plan_fields({"media": {"pixels": np.zeros(2), "grid": {"thw": np.zeros(2)}}})
    assert list(plans) == ["media/pixels", "media/grid/thw"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "no fields"),
        ({"a": np.zeros(2), "b": np.zeros(3)}, "different numbers of rows"),
        ({"a": 3}, "sequence"),
        ({"a": "text"}, "sequence"),
        ({"a": np.float32(3)}, "one scalar"),
        ({"a": [object()]}, "neither"),
        ({"a": [2**64]}, "64 bits"),
        ({"a": np.zeros(2, "datetime64[s]")}, "datetime64"),
        ({"": np.zeros(2)}, "non-empty"),
        ({3: np.zeros(2)}, "non-empty"),
        ({"a": {"b": np.zeros(1)}, "a/b": np.zeros(1)}, "twice"),
    ],
)
def test_unusable_values_are_named(fields: dict[Any, Any], message: str) -> None:
    with pytest.raises(tq.InvalidArgument, match=message):
        plan_fields(fields)


def test_rows_that_disagree_are_named() -> None:
    for rows in (
        [np.zeros(1), np.zeros(1, np.int8)],
        [np.zeros((1, 2)), np.zeros(1)],
        [np.zeros(()), np.zeros(1)],
        [np.zeros(1), "x"],
    ):
        with pytest.raises(tq.SchemaMismatch, match="'a'"):
            plan_fields({"a": rows})
    with pytest.raises(tq.InvalidArgument, match="outside"):
        plan_fields({}, {"a": (np.zeros(2), [0, 2])})


def test_torch_tensors_go_in_and_come_out() -> None:
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.int64, torch.bool, torch.uint8):
        rows = [torch.arange(6).reshape(3, 2).to(dtype), torch.zeros(0, 2, dtype=dtype)]
        column = through_a_frame(2, plan_fields({"f": rows})[1])["f"]
        assert column.dtype == str(dtype).removeprefix("torch.")
        back = column.to_torch()
        assert back.dtype == dtype
        assert torch.equal(back, torch.cat(rows))
        back.zero_()  # a copy of its own, without a warning
    stacked = torch.randn(4, 3, requires_grad=True).to(torch.bfloat16)
    assert torch.equal(through_a_frame(4, plan_fields({"f": stacked})[1])["f"].to_torch(), stacked.flatten())
    scalars = [torch.tensor(1.5), torch.tensor(2.5)]
    assert through_a_frame(2, plan_fields({"f": scalars})[1])["f"].to_torch().tolist() == [1.5, 2.5]
    shared = through_a_frame(
        3, plan_fields({}, {"f": (torch.eye(2, dtype=torch.bfloat16), [1, None, 0])})[1]
    )["f"]
    assert shared.to_torch().tolist() == [0, 1, 1, 0]
    with pytest.raises(tq.InvalidArgument):
        through_a_frame(1, plan_fields({"f": ["text"]})[1])["f"].to_torch()
    with pytest.raises(tq.InvalidArgument, match="sparse_coo"):
        plan_fields({"f": torch.zeros(2).to_sparse()})
    with pytest.raises(tq.InvalidArgument, match="float4"):
        plan_fields({"f": torch.empty(2, dtype=torch.float4_e2m1fn_x2)})
