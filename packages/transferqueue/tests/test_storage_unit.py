"""A storage unit's shelf, without a socket."""

import numpy as np
import pytest
import transferqueue as tq
from transferqueue.storage.service import Shelf
from transferqueue.values import frame
from transferqueue.values.encode import plan_fields


def stored(shelf: Shelf, ids: list[int], new: bool = True, **fields: object) -> np.ndarray:
    header, payload = frame.encode(*plan_fields(fields))
    shelf.store(ids, header, payload, new)
    return payload


def test_a_whole_block_goes_out_as_it_came_in() -> None:
    shelf = Shelf()
    payload = stored(shelf, [1, 2, 3], x=np.arange(3), y=["a", "b", "c"])
    assert shelf.read([1, 2, 3], ["y", "x"])[1] is payload
    assert shelf.read([1, 2, 3], None)[1] is payload
    assert shelf.read([2, 1, 3], None)[1] is not payload
    stored(shelf, [2], new=False, x=np.array([7]))
    assert frame.decode(*shelf.read([1, 2, 3], ["x"]))["x"].values.tolist() == [0, 7, 2]


def test_fields_of_none_are_those_all_samples_have() -> None:
    shelf = Shelf()
    stored(shelf, [1, 2], x=np.arange(2))
    stored(shelf, [2], new=False, y=np.arange(1))
    assert list(frame.decode(*shelf.read([1, 2], None))) == ["x"]
    assert sorted(frame.decode(*shelf.read([2], None))) == ["x", "y"]
    with pytest.raises(tq.FieldNotReady) as caught:
        shelf.read([1, 2], ["y"])
    assert (caught.value.field, caught.value.ids) == ("y", [1])


def test_dead_rows_do_not_hold_memory() -> None:
    shelf = Shelf()
    ids = list(range(64))
    image = np.arange(1000.0)
    header, payload = frame.encode(
        *plan_fields({"x": [np.full(100, i) for i in ids]}, {"s": ([image], [0] * 64)})
    )
    shelf.store(ids, header, payload, True)
    whole = shelf.nbytes
    for sample in ids[:-1]:
        shelf.free([sample])
        left = ids[sample + 1 :]
        assert shelf.nbytes <= 2 * (len(left) * 1000 + image.nbytes + 1000)
        column = frame.decode(*shelf.read(left, ["x"]))["x"]
        assert [row[0] for row in column] == left
    np.testing.assert_array_equal(frame.decode(*shelf.read([63], ["s"]))["s"][0], image)
    shelf.free([63])
    assert (shelf.nbytes, len(shelf)) == (0, 0)
    assert whole > 0


def test_unknown_and_given_up_samples_are_refused() -> None:
    shelf = Shelf()
    shelf.free([5])
    with pytest.raises(tq.UnknownSample):
        stored(shelf, [4, 5], x=np.arange(2))
    with pytest.raises(tq.UnknownSample):
        stored(shelf, [4], new=False, x=np.arange(1))
    with pytest.raises(tq.UnknownSample):
        shelf.read([4], None)
    with pytest.raises(tq.InvalidArgument):
        stored(shelf, [4], x=np.arange(2))
    stored(shelf, [4], x=np.arange(1))
    with pytest.raises(tq.InvalidArgument):
        stored(shelf, [4], x=np.arange(1))
    assert len(shelf) == 1
