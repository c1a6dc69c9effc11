"""The same kinds out as in: what a producer holds is what `restore` gives, to the bit."""

import datetime
import gc
import warnings
import weakref
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import transferqueue as tq
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from transferqueue.values import copying, frame
from transferqueue.values.columns import assemble, gather, lay_out
from transferqueue.values.encode import Varying, plan_column, plan_fields
from transferqueue.values.restoring import restore
from transferqueue.values.spec import NUMERIC

DTYPES = st.sampled_from(sorted(NUMERIC))


def sent(fields: dict[str, Any], shared: dict[str, Any] | None = None) -> dict[str, tq.Column]:
    """Through a frame in memory that nobody may write."""
    header, payload = frame.encode(*plan_fields(fields, shared))
    return frame.decode(header, payload.tobytes())


def back(value: Any) -> Any:
    return sent({"f": value})["f"].restore()


def same(got: Any, want: Any) -> bool:
    """Equal with type, dtype and shape; a NaN equals itself."""
    if type(got) is not type(want):
        return False
    if isinstance(want, np.ndarray) and want.dtype.kind not in "OT":
        return (got.dtype, got.shape, got.tobytes()) == (want.dtype, want.shape, want.tobytes())
    if isinstance(want, np.generic):
        return got.dtype == want.dtype and got.tobytes() == want.tobytes()
    if isinstance(want, list | tuple | np.ndarray):
        if isinstance(want, np.ndarray) and got.dtype != want.dtype:
            return False
        return len(got) == len(want) and all(map(same, got, want))
    if isinstance(want, dict):
        return list(got) == list(want) and all(same(got[key], want[key]) for key in want)
    if type(want).__module__.startswith("torch"):
        return same_tensor(got, want)
    return got == want or (got != got and want != want)


def same_tensor(got: Any, want: Any) -> bool:
    import torch

    if got.dtype != want.dtype or got.is_nested != want.is_nested or got.dim() != want.dim():
        return False
    if want.is_nested:
        return got.layout == want.layout and all(map(same_tensor, got.unbind(), want.unbind()))
    if got.shape != want.shape:
        return False
    flat = (each.contiguous().reshape(-1).view(torch.uint8) for each in (got, want))
    return torch.equal(*flat) if want.numel() else True


@st.composite
def shapes(draw: st.DrawFn, rows: int) -> list[tuple[int, ...]]:
    """Row shapes of one rank: equal, ragged in front, or ragged anywhere."""
    rank = draw(st.integers(0, 3))
    sizes = st.integers(0, 3)
    first = tuple(draw(sizes) for _ in range(rank))
    match draw(st.sampled_from(["equal", "front", "anywhere"])) if rank else "equal":
        case "front":
            return [(draw(sizes), *first[1:]) for _ in range(rows)]
        case "anywhere":
            return [tuple(draw(sizes) for _ in range(rank)) for _ in range(rows)]
        case _:
            return [first] * rows


@st.composite
def arrays(draw: st.DrawFn, rows: int) -> list[np.ndarray]:
    dtype = draw(DTYPES)
    return [draw(hnp.arrays(dtype, shape)) for shape in draw(shapes(rows))]


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=4), inner, max_size=3)
        | hnp.arrays(DTYPES, hnp.array_shapes(min_dims=0, max_dims=2, min_side=0, max_side=2))
    ),
    max_leaves=6,
)

ROWS: list[Callable[[int], st.SearchStrategy[list[Any]]]] = [
    arrays,
    lambda rows: st.lists(st.integers(-(2**63), 2**63 - 1), min_size=rows, max_size=rows),
    lambda rows: st.lists(st.floats(), min_size=rows, max_size=rows),
    lambda rows: st.lists(st.complex_numbers(), min_size=rows, max_size=rows),
    lambda rows: st.lists(st.booleans(), min_size=rows, max_size=rows),
    lambda rows: st.lists(st.text(max_size=5), min_size=rows, max_size=rows),
    lambda rows: st.lists(st.binary(max_size=5), min_size=rows, max_size=rows),
    lambda rows: st.lists(st.binary(max_size=5).map(bytearray), min_size=rows, max_size=rows),
    lambda rows: st.lists(
        st.dictionaries(st.text(max_size=3), PLAIN, max_size=3), min_size=rows, max_size=rows
    ),
    lambda rows: DTYPES.flatmap(lambda dtype: hnp.arrays(dtype, rows).map(list)),
]


@st.composite
def batches(draw: st.DrawFn, rows: int) -> Any:
    """A container of rows as a producer may hold it, of numpy and plain values."""
    container = draw(st.sampled_from(["array", "list", "tuple", "objects"]))
    if container == "array":
        shape = draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3))
        return draw(hnp.arrays(draw(DTYPES), (rows, *shape)))
    values = draw(draw(st.sampled_from(ROWS))(rows))
    values = [None if draw(st.integers(0, 5)) == 0 else value for value in values]
    if container == "objects":
        array = np.empty(rows, object)
        for at, value in enumerate(values):
            array[at] = value
        return array
    return tuple(values) if container == "tuple" else values


@settings(deadline=None)
@given(st.data(), st.integers(0, 5))
def test_any_batch_comes_back_as_it_was(data: st.DataObject, rows: int) -> None:
    batch = data.draw(batches(rows))
    column = sent({"f": batch})["f"]
    for copy in (None, True, False):
        assert same(column.restore(copy=copy), batch)
    again = frame.decode(*frame.encode(rows, {"f": gather([(column, 0, rows)])}))["f"]
    assert same(again.restore(), batch)


@settings(deadline=None)
@given(st.data(), st.integers(1, 5))
def test_a_batch_put_together_from_its_slices_is_the_batch(data: st.DataObject, rows: int) -> None:
    batch = data.draw(batches(rows))
    column = sent({"f": batch})["f"]
    cuts = sorted([0, rows, *data.draw(st.lists(st.integers(0, rows), max_size=3))])
    pieces = [(column, start, stop) for start, stop in pairwise(cuts)]
    joined = assemble(pieces, rows)
    assert same(joined.restore(), batch)
    assert same(lay_out(gather(pieces)).restore(), batch)
    assert same(joined.restore(copy=False), batch)


@settings(deadline=None)
@given(st.data(), st.integers(1, 4))
def test_shared_rows_come_back_repeated(data: st.DataObject, rows: int) -> None:
    values = data.draw(data.draw(st.sampled_from(ROWS))(rows))
    index = data.draw(st.lists(st.none() | st.integers(0, rows - 1), min_size=1, max_size=6))
    column = sent({}, {"f": (values, index)})["f"]
    want = [None if at is None else values[at] for at in index]
    assert same(column.restore(), want)
    assert same(column.slice(1, len(index)).restore(), want[1:])
    assert same(
        assemble([(column, 0, 1), (column, 0, len(index))], len(index) + 1).restore(), want[:1] + want
    )


@settings(deadline=None)
@given(st.data())
def test_rows_of_any_shape_join(data: st.DataObject) -> None:
    """Stacked, ragged and free rows of one field: all come back, and lengths and offsets fit them."""
    first, second = (
        [
            data.draw(hnp.arrays("int16", tuple(shape)))
            for shape in data.draw(st.lists(SHAPE3, min_size=1, max_size=3))
        ]
        for _ in range(2)
    )
    one = sent({"f": Varying(first)})["f"]
    if len({row.shape[1:] for row in second}) > 1 or data.draw(st.booleans()):
        second = [row[:, :2, :1] for row in second] if data.draw(st.booleans()) else second
    other = sent({"f": second})["f"]
    assert one.spec.accepts(other.spec)
    joined = assemble(
        [(one, 0, len(first)), (other, 0, len(second)), (one, 0, 1)], len(first) + len(second) + 1
    )
    want = [*first, *second, first[0]]
    assert same(joined.restore(), want)
    whole = lay_out(gather([(joined, 0, len(joined))]))
    assert same(whole.restore(), want)
    assert whole.lengths.tolist() == joined.lengths.tolist() == [len(row) for row in want]
    assert whole.offsets.tolist() == np.cumsum([0, *(row.size for row in want)]).tolist()


SHAPE3 = st.tuples(*[st.integers(0, 3)] * 3)


def test_a_schema_leaves_free_what_was_free_in_the_first_write() -> None:
    fixed = plan_column("f", [np.zeros((2, 4, 3))]).spec
    free = plan_column("f", [np.zeros((2, 4, 3)), np.zeros((4, 2, 3))]).spec
    assert str(free) == "float64[*, *, 3]"
    assert free.accepts(fixed)
    assert not fixed.accepts(free)
    assert not free.accepts(plan_column("f", [np.zeros((2, 4, 1))]).spec)
    assert not free.accepts(plan_column("f", [np.zeros((2, 4))]).spec)
    assert not free.accepts(plan_column("f", [np.zeros((2, 4, 3), "f4")]).spec)
    assert fixed.accepts(plan_column("f", [None]).spec)
    assert plan_column("f", Varying([np.zeros((2, 4, 3))])).spec.trailing == (-1, -1)
    with pytest.raises(tq.SchemaMismatch):
        assemble([(sent({"f": [np.zeros((2, 4, i))]})["f"], 0, 1) for i in (1, 2)], 2)


def test_strings_bytes_and_objects_in_numpy() -> None:
    for array in (
        np.array(["a", "bcd", ""]),
        np.array([b"a", b"bcd"]),
        np.array(["a", "b"], "U9"),
        np.array([], "S3"),
        np.array(["a", "bcd"], np.dtypes.StringDType()),
        np.array(["x", None, "z"], object),
        np.array([], object),
        np.array([{"a": 1}, [2]], object),
    ):
        assert same(back(array), array)
    pieces = [sent({"f": np.array([text])})["f"] for text in ("a", "bcd")]
    assert same(assemble([(piece, 0, 1) for piece in pieces], 2).restore(), np.array(["a", "bcd"]))


def test_any_byte_order_and_strides_come_back_native_and_contiguous() -> None:
    array = np.arange(24, dtype=">f4").reshape(4, 6)[::-1, ::2]
    got = back(array)
    assert got.dtype == np.dtype("float32")
    assert got.tolist() == array.tolist()
    rows = back([array[0], array[1, ::-1]])
    assert [row.tolist() for row in rows] == [array[0].tolist(), array[1, ::-1].tolist()]


def test_what_changes_on_the_way_is_what_the_page_says() -> None:
    utc = datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC)
    assert back([{"t": (1, 2), "when": utc}]) == [{"t": [1, 2], "when": utc}]
    assert back([memoryview(b"ab")]) == [b"ab"]
    assert same(back([1, 2.5]), [1.0, 2.5])
    with pytest.raises(tq.InvalidArgument, match=r"2\*\*53"):
        plan_column("f", [2**60 + 1, 0.5])
    with pytest.raises(tq.InvalidArgument, match="64 bits"):
        plan_column("f", [2**63])
    assert same(back(["half a \ud83d character"]), ["half a \ud83d character"])
    assert same(back([1, np.float64(2.5)]), [1.0, 2.5])
    with pytest.raises(tq.InvalidArgument, match="masked"):
        plan_column("f", [np.ma.masked_equal(np.arange(3), 1)])
    with pytest.raises(tq.InvalidArgument, match="masked"):
        plan_column("f", np.ma.masked_equal(np.arange(3), 1))
    with pytest.raises(tq.InvalidArgument, match="2 dimensions"):
        plan_column("f", np.array([["a", "b"]]))


def test_arrays_are_views_and_copies_are_writable() -> None:
    header, payload = frame.encode(*plan_fields({"s": np.ones((3, 2)), "l": [np.ones(2), np.ones(1), None]}))
    columns = frame.decode(header, payload)
    for name in columns:
        views = columns[name].restore()
        for view in views:
            if view is not None:
                assert np.shares_memory(view, payload)
                assert not view.flags.writeable
        for own in columns[name].restore(copy=True):
            if own is not None:
                assert not np.shares_memory(own, payload)
                own[...] = 2


def test_mappings_come_back_and_names_with_a_slash_stay() -> None:
    fields = {
        "media": {"pixels": np.zeros((2, 3)), "grid": {"thw": [np.arange(2), np.arange(3)]}},
        "plain/name": [1, 2],
        "a/b": {"c/d": ["x", "y"]},
    }
    columns = sent(fields)
    assert list(columns) == ["media/pixels", "media/grid/thw", "plain/name", "a/b/c/d"]
    assert same(restore(columns), fields)
    assert same(restore({"media/pixels": columns["media/pixels"]}), {"media": {"pixels": np.zeros((2, 3))}})
    columns["media"] = sent({"media": [1, 2]})["media"]
    got = restore({name: columns[name] for name in ("media", "media/pixels")})
    assert list(got) == ["media", "media/pixels"]


def test_text_that_is_none_is_corrupt() -> None:
    header, payload = frame.encode(*plan_fields({"f": [b"\xff\xfe", b"\xc1"]}))
    for dtype in ("str", "data"):
        column = header.columns[0]
        claimed = frame.ColumnHeader(column.name, tq.FieldSpec(dtype), column.total, 2, False, False)
        decoded = frame.decode(frame.FrameHeader(2, [claimed], header.checksum), payload)["f"]
        with pytest.raises(tq.Corrupt):
            decoded.tolist()


@settings(deadline=None)
@given(st.binary(max_size=40))
def test_hostile_plain_data_is_refused_or_read(raw: bytes) -> None:
    for row in (raw, b"\xc7" + bytes([len(raw)]) + b"\x01" + raw):
        header, payload = frame.encode(*plan_fields({"f": [row]}))
        column = header.columns[0]
        claimed = frame.ColumnHeader(column.name, tq.FieldSpec("data"), column.total, 1, False, False)
        decoded = frame.decode(frame.FrameHeader(1, [claimed], header.checksum), payload)["f"]
        try:
            decoded.restore()
        except tq.Corrupt:
            continue


def test_ml_dtypes_arrays_keep_their_bits() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        dtype = getattr(ml_dtypes, name)
        stacked = np.arange(6).astype(dtype).reshape(3, 2)
        for batch in (stacked, list(stacked), [None, *stacked], list(stacked[:, 0]), [{"x": stacked}]):
            assert same(back(batch), batch)
        assert sent({"f": stacked[:, 0]})["f"].dtype == name


# ---- torch


def torch_module() -> Any:
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)
    return torch


TORCH_DTYPES = [
    *sorted(NUMERIC),
    "bfloat16",
    *(f"float8_{form}" for form in ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz", "e8m0fnu")),
]


@st.composite
def tensors(draw: st.DrawFn, dtype: Any, shape: tuple[int, ...]) -> Any:
    """Any bits, of any strides."""
    torch = torch_module()
    size = torch.empty(0, dtype=dtype).element_size()
    raw = draw(hnp.arrays("uint8", (*shape, size), elements=st.integers(0, 1)))
    tensor = torch.from_numpy(raw).reshape(-1).view(dtype).reshape(shape)
    if len(shape) > 1 and draw(st.booleans()):
        tensor = tensor.transpose(0, 1).contiguous().transpose(0, 1)
    if tensor.is_floating_point() and "float8" not in str(dtype) and draw(st.booleans()):
        tensor = tensor.requires_grad_()
    return tensor


@settings(deadline=None)
@given(st.data(), st.integers(0, 4), st.sampled_from(TORCH_DTYPES))
def test_any_tensors_come_back_as_they_were(data: st.DataObject, rows: int, name: str) -> None:
    torch = torch_module()
    dtype = getattr(torch, name)
    match data.draw(st.sampled_from(["tensor", "list", "tuple", "nested", "data"])):
        case "tensor":
            batch = data.draw(tensors(dtype, (rows, *data.draw(st.lists(st.integers(0, 3), max_size=3)))))
        case "nested":
            width = data.draw(st.sampled_from([(), (2,), (0,)]))
            lengths = data.draw(st.lists(st.integers(0, 3), min_size=max(rows, 1), max_size=max(rows, 1)))
            offsets = torch.tensor([0, *np.cumsum(lengths)])
            values = data.draw(tensors(dtype, (int(offsets[-1]), *width)))
            batch = torch.nested.nested_tensor_from_jagged(values.detach(), offsets)
        case "data":
            batch = [{"x": [data.draw(tensors(dtype, (2, 3)))]} for _ in range(rows)]
        case container:
            batch = [data.draw(tensors(dtype, shape)) for shape in data.draw(shapes(rows))]
            batch = [None if data.draw(st.integers(0, 5)) == 0 else row for row in batch]
            batch = tuple(batch) if container == "tuple" else batch
    column = sent({"f": batch})["f"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for copy in (None, True, False):
            assert same(column.restore(copy=copy), batch)
        count = len(column)
        again = assemble([(column, 0, 0), (column, 0, count // 2), (column, count // 2, count)], count)
        assert same(again.restore(), batch)
        assert same(lay_out(gather([(again, 0, count)])).restore(), batch)


def test_tensors_are_copies_unless_a_view_is_asked_for() -> None:
    torch = torch_module()
    rows = [torch.ones(2), torch.ones(3)]
    header, written = frame.encode(*plan_fields({"l": rows, "t": torch.ones(2, 3)}))
    payload = np.frombuffer(written.tobytes(), np.uint8)  # as an arena has it: an array of its own
    columns = frame.decode(header, payload)
    for copy in (None, True):
        for tensor in (*columns["l"].restore(copy=copy), columns["t"].restore(copy=copy)):
            tensor.zero_()
    assert columns["t"].values.sum() == 6
    assert columns["l"].values.sum() == 5
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns of read-only memory
        views = [*columns["l"].restore(copy=False), columns["t"].to_torch(copy=False)]
    inside = range(payload.ctypes.data, payload.ctypes.data + payload.nbytes)
    assert all(view.data_ptr() in inside for view in views)
    memory = weakref.ref(payload)
    del columns, header, payload
    assert views[1].tolist() == [1, 1, 1]
    assert memory() is not None  # a view keeps the memory
    del views
    gc.collect()
    assert memory() is None


@pytest.mark.parametrize("on_device", [False, True])
def test_large_tensors_of_any_strides_arrive(on_device: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the sizes that are joined in one go; `on_device` takes the way of tensors that are elsewhere."""
    torch = torch_module()
    if on_device:
        monkeypatch.setattr(copying, "_is_cpu", lambda tensor: False)
        monkeypatch.setattr(copying, "_CHUNK", 50_000)
    generator = torch.Generator().manual_seed(7)
    fields = {
        "rows": [
            torch.randn(n, generator=generator, requires_grad=n % 2 == 0) for n in (9_000, 0, 20_001, 3)
        ],
        "half": [torch.randn(7, n, generator=generator).t().to(torch.bfloat16) for n in (500, 900, 1, 2)],
        "images": [torch.randn(3, n, 50, generator=generator).permute(1, 2, 0) for n in (30, 60, 3, 1)],
        "stacked": torch.randn(60, 4, 50, generator=generator).permute(1, 0, 2),
        "nested": torch.nested.nested_tensor(
            [torch.randn(n, 9, generator=generator) for n in (400, 1, 9, 300)], layout=torch.jagged
        ),
    }
    got = restore(sent(fields))
    for name, want in fields.items():
        assert same(got[name], want), name


def test_large_arrays_of_any_strides_and_byte_order_arrive() -> None:
    rng = np.random.default_rng(7)
    fields = {
        "rows": [rng.standard_normal(2 * n)[::-2] for n in (9_000, 0, 20_001, 3)],
        "big": [rng.standard_normal((n, 5)).astype(">f4") for n in (900, 70, 0, 3)],
        "images": [rng.integers(0, 256, (3, n, 50)).transpose(1, 2, 0) for n in (30, 60, 3, 1)],
        "stacked": rng.standard_normal((60, 4, 50)).transpose(1, 0, 2),
    }
    got = restore(sent(fields))
    for name, want in fields.items():
        for row, expected in zip(got[name], want, strict=True):
            assert row.dtype.isnative
            assert row.shape == expected.shape
            assert np.array_equal(row, expected)


def test_shared_tensors_are_repeated_and_each_is_the_readers_own() -> None:
    torch = torch_module()
    column = sent({}, {"f": ([torch.arange(2), torch.arange(3)], [0, None, 1, 0])})["f"]
    got = column.restore()
    assert same(got, [torch.arange(2), None, torch.arange(3), torch.arange(2)])
    got[0].zero_()
    assert got[3].tolist() == [0, 1]
    stacked = sent({}, {"f": (torch.eye(2), [1, 1, 0])})["f"]
    assert same(stacked.restore(), torch.eye(2)[[1, 1, 0]])


def test_stacked_rows_of_different_puts() -> None:
    torch = torch_module()
    narrow, wide = (sent({"f": torch.ones(2, size)})["f"] for size in (3, 4))
    assert same(assemble([(narrow, 0, 2), (narrow, 1, 2)], 3).restore(), torch.ones(3, 3))
    nested = assemble([(narrow, 0, 2), (wide, 0, 1)], 3).restore()
    assert same(
        nested, torch.nested.nested_tensor([torch.ones(3)] * 2 + [torch.ones(4)], layout=torch.jagged)
    )
    array = sent({"f": np.ones((1, 3), "f4")})["f"]
    assert array.spec == narrow.spec
    mixed = assemble([(narrow, 0, 1), (array, 0, 1)], 2)
    assert same(mixed.restore(), [torch.ones(3)] * 2)
    missing = sent({"f": [None]})["f"]
    assert same(assemble([(missing, 0, 1), (narrow, 0, 1)], 2).restore(), [None, torch.ones(3)])
    assert same(assemble([(missing, 0, 1), (array, 0, 1)], 2).restore(), [None, np.ones(3, "f4")])


def test_nested_tensors_with_gaps_or_a_later_ragged_dimension() -> None:
    torch = torch_module()
    whole = torch.arange(20.0).reshape(2, 10)
    gaps = torch.nested.narrow(whole, 1, torch.tensor([1, 3]), torch.tensor([2, 4]), layout=torch.jagged)
    assert same(back(gaps), gaps.contiguous())
    rows = [torch.arange(8.0).reshape(2, 4), torch.arange(12.0).reshape(3, 4)]
    turned = torch.nested.nested_tensor(rows, layout=torch.jagged).transpose(1, 2)
    column = sent({"f": turned})["f"]
    assert [row.shape for row in column] == [(4, 2), (4, 3)]
    restored = column.restore()
    assert restored.shape[1] == 4
    assert same(restored, turned)
    other = sent({"f": torch.nested.nested_tensor([torch.ones(1, 5)], layout=torch.jagged).transpose(1, 2)})[
        "f"
    ]
    joined = assemble([(column, 0, 2), (other, 0, 1)], 3)
    assert same(joined.restore(), [*turned.unbind(), torch.ones(5, 1)])
    assert same(assemble([(column, 1, 2), (column, 0, 1)], 2).restore().unbind()[1], turned.unbind()[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls it a prototype
        strided = torch.nested.nested_tensor(rows, layout=torch.strided)
    with pytest.raises(tq.InvalidArgument, match="unbind"):
        plan_column("f", strided)


def test_nested_tensors_of_equal_lengths_can_be_combined() -> None:
    torch = torch_module()
    rows = [torch.ones(2), torch.ones(3)]
    fields = {name: torch.nested.nested_tensor(rows, layout=torch.jagged) for name in ("a", "b")}
    got = restore(sent(fields))
    assert (got["a"] + got["b"]).values().tolist() == [2] * 5


def test_mixed_rows_of_numpy_and_torch_come_back_as_tensors() -> None:
    torch = torch_module()
    assert same(back([np.ones(2, "f4"), torch.zeros(1)]), [torch.ones(2), torch.zeros(1)])
    with pytest.raises(tq.SchemaMismatch):
        plan_column("f", [np.ones(2), torch.zeros(1)])
    with pytest.raises(tq.SchemaMismatch, match="mixes"):
        plan_column("f", ["x", torch.zeros(1)])


def test_images_of_any_size_are_one_field() -> None:
    torch = torch_module()
    images = [torch.arange(h * w * 3).to(torch.uint8).reshape(h, w, 3) for h, w in ((4, 2), (2, 3), (1, 1))]
    column = sent({"f": images})["f"]
    assert str(column.spec) == "uint8[*, *, 3]"
    assert column.lengths.tolist() == [4, 2, 1]
    assert same(column.restore(), images)
    one = sent({"f": Varying(images[1][None])})["f"]
    assert same(one.restore(), images[1][None])
    assert same(assemble([(column, 0, 1), (one, 0, 1)], 2).restore(), [images[0], images[1]])
