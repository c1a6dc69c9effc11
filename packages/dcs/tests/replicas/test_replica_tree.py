"""A tree as bytes and back, bit for bit."""

import copy
import math
import random
import struct
from collections import OrderedDict
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from dcs.errors import ProtocolError
from dcs.replicas import UnsupportedLeaf
from dcs.replicas.arenas import Arena
from dcs.replicas.tree import flatten, rebuild
from hypothesis import given
from hypothesis import strategies as st

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32,
    torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64,
    torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu,
]  # fmt: skip


def through_memory(tree: Any) -> Any:
    flat = flatten(tree)
    arena = Arena(flat.nbytes)
    arena.fill(flat)
    memory = np.frombuffer(bytearray(arena.memory[: flat.nbytes]), np.uint8)
    arena.close()
    return rebuild(flat.structure, memory)


def bits(value: float) -> bytes:
    return struct.pack("<d", value)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_keeps_its_bits(dtype):
    raw = torch.randint(0, 256, (48 * dtype.itemsize,), dtype=torch.uint8)
    raw = raw % 2 if dtype is torch.bool else raw
    tensor = raw.view(dtype).view(2, 3, 8)
    restored = through_memory({"t": tensor})["t"]
    assert restored.dtype == dtype
    assert restored.shape == (2, 3, 8)
    assert torch.equal(restored.reshape(-1).view(torch.uint8), raw)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (5, 7)])
def test_shapes_and_strides(shape):
    tensor = torch.randn(shape)
    assert torch.equal(through_memory(tensor), tensor)
    transposed = torch.randn(6, 4).t()[::2]
    restored = through_memory([transposed])[0]
    assert torch.equal(restored, transposed)
    assert restored.is_contiguous()
    assert torch.equal(through_memory(torch.ones(3, 1).expand(3, 4)), torch.ones(3, 4))


def test_gradients_parameters_and_tensors_that_occur_twice():
    weight = torch.nn.Parameter(torch.randn(3))
    frozen = torch.nn.Parameter(torch.randn(3), requires_grad=False)
    leaf = torch.randn(2, requires_grad=True)
    tree = {"w": weight, "tied": weight, "f": frozen, "leaf": leaf, "detached": weight.detach()}
    restored = through_memory(tree)
    assert type(restored["w"]) is torch.nn.Parameter
    assert restored["tied"] is restored["w"]
    assert restored["w"].requires_grad
    assert type(restored["f"]) is torch.nn.Parameter
    assert not restored["f"].requires_grad
    assert type(restored["leaf"]) is torch.Tensor
    assert restored["leaf"].requires_grad
    assert not restored["detached"].requires_grad
    assert flatten({"a": weight, "b": weight}).nbytes == flatten({"a": weight}).nbytes


def test_conjugate_and_negative_views_are_resolved():
    tensor = torch.randn(4, dtype=torch.complex64)
    assert torch.equal(through_memory(tensor.conj()), tensor.conj().resolve_conj())
    assert torch.equal(through_memory(tensor.conj().imag), -tensor.imag)


def test_numpy_arrays_and_scalars():
    tree = {
        "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "bool": np.array([True, False]),
        "empty": np.zeros((0, 3), np.int16),
        "scalar array": np.array(3.5),
        "text": np.array(["a", "bcd"]),
        "time": np.array(["2026-11-30"], dtype="datetime64[D]"),
        "big endian": np.array([1, 2], dtype=">i4"),
        "step": np.int64(7),
        "loss": np.float32(0.1),
    }
    tree["read only"] = np.arange(4)
    tree["read only"].flags.writeable = False
    restored = through_memory(tree)
    for name, array in tree.items():
        assert type(restored[name]) is type(array), name
        assert restored[name].dtype == array.dtype
        assert np.array_equal(restored[name], array)
    assert restored["read only"].flags.writeable


def test_random_states_go_on_as_they_would_have():
    generator = torch.Generator().manual_seed(3)
    numpy_generator = np.random.default_rng(5)
    random.seed(7)
    tree = {
        "generator": generator,
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "bits": numpy_generator.bit_generator.state,
    }
    restored = through_memory(tree)
    assert torch.equal(torch.rand(5, generator=restored["generator"]), torch.rand(5, generator=generator))
    assert torch.equal(restored["torch"], tree["torch"])
    torch.set_rng_state(restored["torch"])  # which reads from where the storage begins
    assert torch.equal(torch.get_rng_state(), tree["torch"])
    expected = random.random()
    random.setstate(restored["python"])
    assert random.random() == expected
    other = np.random.default_rng()
    other.bit_generator.state = restored["bits"]
    assert other.random() == numpy_generator.random()
    assert restored["numpy"][0] == "MT19937"
    assert np.array_equal(restored["numpy"][1], tree["numpy"][1])


def test_state_dicts_of_modules_keep_their_metadata():
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    kept: Any = module.state_dict()
    restored: Any = through_memory(kept)
    assert restored.__class__ is OrderedDict
    assert restored._metadata == kept._metadata
    module.load_state_dict(restored)


scalars = (
    st.none() | st.booleans() | st.integers() | st.integers(-(2**200), 2**200) | st.text() | st.binary()
    | st.floats(allow_nan=False) | st.complex_numbers(allow_nan=False)
)  # fmt: skip
keys = st.text() | st.integers() | st.booleans() | st.none() | st.tuples(st.text(), st.integers())
plain = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
        | st.dictionaries(st.text(), inner, max_size=3).map(OrderedDict)
    ),
    max_leaves=20,
)


def kinds(value: Any) -> Any:
    """The types of everything in a tree: 1, True and 1.0 are equal, and must not be taken for each other."""
    if isinstance(value, dict):
        return type(value), [(kinds(key), kinds(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [kinds(item) for item in value]
    return type(value), math.copysign(1.0, value) if isinstance(value, float) else 0


@given(plain)
def test_plain_data_comes_back_as_it_was(tree):
    flat = flatten(tree)
    restored = rebuild(flat.structure, np.empty(0, np.uint8))
    assert restored == tree
    assert kinds(restored) == kinds(tree)


@pytest.mark.parametrize(
    "pattern", ["010000000000f87f", "010000000000f07f", "ffffffffffffffff", "0000000000000080"]
)
def test_not_a_number_and_minus_zero_keep_their_bits(pattern):
    value = struct.unpack("<d", bytes.fromhex(pattern))[0]
    assert bits(through_memory((value,))[0]) == bytes.fromhex(pattern)


def test_equal_trees_are_equal_bytes_whatever_was_in_the_memory():
    tree = {"a": torch.ones(3, dtype=torch.uint8), "b": torch.ones(5)}
    first, second = flatten(tree), flatten(copy.deepcopy(tree))
    used, fresh = Arena(first.nbytes), Arena(first.nbytes)
    used.fill(flatten(torch.full((first.nbytes,), 255, dtype=torch.uint8)))
    used.fill(first)
    fresh.fill(second)
    assert first.structure == second.structure
    assert used.memory[: first.nbytes] == fresh.memory[: first.nbytes]
    used.close()
    fresh.close()


class Strange:
    pass


@pytest.mark.parametrize(
    ("tree", "path"),
    [
        ({"a": [0, Strange()]}, r"a\[1\].*Strange"),
        ({"a": {"b": {1, 2}}}, r"'a.b'.*set"),
        ({"a": np.array([None])}, "'a'.*object"),
        ({"a": torch.zeros(2, device="meta")}, "'a'.*meta"),
        ({"a": torch.zeros(2).to_sparse()}, "'a'.*sparse"),
        ({Strange(): 1}, "key of the tree.*Strange"),
        ({"a": "\ud800"}, "Unicode"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(tree, path):
    with pytest.raises(UnsupportedLeaf, match=path):
        flatten(tree)


def test_a_cycle_is_refused():
    tree: list[Any] = []
    tree.append(tree)
    with pytest.raises(UnsupportedLeaf, match="cycle"):
        flatten(tree)


@pytest.mark.parametrize(
    "structure",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode([99]),
        msgspec.msgpack.encode([]),
        msgspec.msgpack.encode([9, 0, "float32", [1 << 40], "cpu", 0]),
        msgspec.msgpack.encode([9, -4, "float32", [1], "cpu", 0]),
        msgspec.msgpack.encode([9, 0, "load", [1], "cpu", 0]),
        msgspec.msgpack.encode([9, 0, "float32", [-1, -2], "cpu", 0]),
        msgspec.msgpack.encode([10, 0, "O", [1]]),
        msgspec.msgpack.encode([2, "key without a value"]),
        b"\x91" * 100_000,
    ],
)
def test_a_description_that_is_none_is_refused(structure):
    with pytest.raises(ProtocolError):
        rebuild(structure, np.zeros(64, np.uint8))


def test_tensors_can_be_put_elsewhere():
    flat = flatten({"t": torch.ones(3)})
    restored = rebuild(flat.structure, np.zeros(flat.nbytes, np.uint8), device="meta")
    assert restored["t"].device.type == "meta"
