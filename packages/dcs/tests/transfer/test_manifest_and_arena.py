"""Manifests and what an arena takes: hashing, and what is refused."""

import dcs
import pytest
import torch
from dcs import manifest as manifests
from dcs.layout import ITEMSIZE, Layout, TensorSpec
from dcs.memory.arena import Arena, check
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

# The same examples everywhere, and no clock: the machine may be busy.
steady = settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])

specs = st.builds(
    TensorSpec,
    name=st.text(st.characters(codec="utf-8"), min_size=1, max_size=12),
    shape=st.lists(st.integers(0, 9), max_size=4).map(tuple),
    dtype=st.sampled_from(sorted(ITEMSIZE)),
)
layouts = st.lists(specs, max_size=8, unique_by=lambda spec: spec.name).map(
    lambda found: Layout(tuple(sorted(found, key=lambda spec: spec.name)))
)


def manifest_of(layout: Layout, arena: Arena, chunk_bytes: int = 4096) -> manifests.Manifest:
    spans = range(0, arena.nbytes, chunk_bytes)
    chunks = tuple(manifests.hash_chunk(arena.memory[start : start + chunk_bytes]) for start in spans)
    return manifests.Manifest.of(2, layout.fingerprint, arena.nbytes, chunk_bytes, chunks)


def decode(data: bytes | bytearray, layout: Layout, root: bytes) -> manifests.Manifest:
    return manifests.decode(data, layout.fingerprint, layout.offsets()[1], root)


@steady
@given(layouts)
def test_a_manifest_survives_encoding_within_the_limit(layout):
    manifest = manifest_of(layout, Arena(layout))
    encoded = manifest.encode()
    assert len(encoded) <= manifests.encoded_limit(manifest.nbytes)
    assert decode(encoded, layout, manifest.root) == manifest


@steady
@given(layouts, st.data())
def test_one_changed_byte_changes_one_chunk_hash_and_the_root(layout, data):
    arena = Arena(layout)
    before = manifest_of(layout, arena)
    if arena.nbytes == 0:
        return
    place = data.draw(st.integers(0, arena.nbytes - 1))
    arena.memory[place] ^= 1 << data.draw(st.integers(0, 7))
    after = manifest_of(layout, arena)
    differing = [
        index
        for index, pair in enumerate(zip(before.chunks, after.chunks, strict=True))
        if len(set(pair)) > 1
    ]
    assert differing == [place // 4096]
    assert before.root != after.root


@steady
@given(layouts, st.data())
def test_a_manifest_with_any_flipped_bit_is_refused_or_names_another_version(layout, data):
    manifest = manifest_of(layout, Arena(layout))
    encoded = bytearray(manifest.encode())
    encoded[data.draw(st.integers(0, len(encoded) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        decoded = decode(encoded, layout, manifest.root)
    except dcs.CorruptChunk:
        return
    # The version is outside the root; the receiver compares it with what was announced. An integer whose
    # encoding changed without changing its value is the same manifest.
    assert decoded.version != manifest.version or decoded == manifest


@steady
@given(st.binary(max_size=300))
def test_random_bytes_are_no_manifest(data):
    layout = dcs.layout.of({"w": torch.zeros(3)})
    with pytest.raises(dcs.CorruptChunk):
        decode(data, layout, bytes(16))


@steady
@given(layouts, st.sampled_from([4096, 8192, 1 << 22]), st.integers(0, 2**31))
def test_filling_an_arena_hashes_what_it_copied(layout, chunk_bytes, seed):
    arena = Arena(layout)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for spec in layout.tensors:
        raw = torch.randint(0, 2, (spec.nbytes,), dtype=torch.uint8, generator=generator)
        tensors[spec.name] = raw.view(getattr(torch, spec.dtype)).view(spec.shape)
    chunks = arena.fill(tensors, chunk_bytes)
    assert chunks == manifest_of(layout, arena, chunk_bytes).chunks
    for name, tensor in tensors.items():
        assert torch.equal(arena.tensors[name], tensor)


@pytest.mark.parametrize(
    ("change", "tensor", "got", "expected"),
    [
        ({"b": torch.ones(4)}, "b", "float32[4]", "float32[3]"),
        ({"b": torch.ones(3, dtype=torch.float64)}, "b", "float64[3]", "float32[3]"),
        ({"b": None}, "b", "absent", "float32[3]"),
        ({"c": torch.ones(1, 2)}, "c", "float32[1, 2]", "absent"),
    ],
)
def test_tensors_that_do_not_fit_the_layout_are_named(change, tensor, got, expected):
    layout = dcs.layout.of({"a": torch.ones(2), "b": torch.ones(3)})
    tensors = {"a": torch.ones(2), "b": torch.ones(3)} | change
    tensors = {name: value for name, value in tensors.items() if value is not None}
    with pytest.raises(dcs.LayoutMismatch) as caught:
        check(tensors, layout)
    assert (caught.value.tensor, caught.value.got, caught.value.expected) == (tensor, got, expected)
    error = dcs.layout.mismatch(dcs.layout.of(tensors), layout, "these")
    assert error is not None
    assert (error.tensor, error.got, error.expected) == (tensor, got, expected)


def test_what_is_only_mapped_is_never_hashed_and_what_is_sent_is_hashed_when_it_is_asked_for(
    publish_to, subscribe, monkeypatch
):
    hashed = []
    monkeypatch.setattr("dcs.memory.arena.Arena.fill", lambda *_: pytest.fail("hashed while it was frozen"))
    monkeypatch.setattr(
        "dcs.memory.shelf.hash_chunk", lambda view, real=manifests.hash_chunk: hashed.append(1) or real(view)
    )
    tensors = {"w": torch.arange(40_000.0)}
    publisher = publish_to(tensors, chunk_bytes=64 << 10)
    mapping = subscribe(tensors, "mapping", chunk_bytes=64 << 10)
    publisher.publish(0, tensors)
    staged = mapping.next(timeout=10)
    assert staged is not None
    assert staged.wire == "shm"
    assert torch.equal(staged.tensors["w"], tensors["w"])
    staged.ack()
    assert hashed == []
    found = subscribe(tensors, "far", wires=("tcp",), chunk_bytes=64 << 10).fetch(timeout=10)
    assert torch.equal(found["w"], tensors["w"])
    assert len(hashed) == 3  # its chunks, once each
