"""Bits that flip in a difference, and in the manifest that a broadcast is held against."""

import pytest
import torch
from dcs.manifest import Manifest

SIZE = 200_000
CHUNK = 64 << 10


def stepped(version: int) -> dict[str, torch.Tensor]:
    """One weight in a hundred is the version's, so that differences are small."""
    tensor = torch.arange(SIZE, dtype=torch.int32)
    tensor[::100] = version
    return {"w": tensor}


@pytest.mark.parametrize("at", [0, 5, 13, 17, 20, 28, 33, 45, 100, 1000, 3000])
def test_a_flipped_bit_in_a_difference_is_noticed_and_it_is_asked_for_again(publish_to, subscribe, proxy, at):
    publisher = publish_to(stepped(0), advertise="127.0.0.2", chunk_bytes=CHUNK, wires=("tcp",))
    between = proxy(publisher)
    subscriber = subscribe(stepped(0), chunk_bytes=CHUNK, wires=("tcp",), delta=True)
    publisher.publish(0, stepped(0))
    subscriber.fetch(0)
    for version in range(1, 4):
        between.flip_next(at + version)  # in the next reply: 32 bytes, a difference
        publisher.publish(version, stepped(version))
        staged = subscriber.next(after=version - 1, timeout=20)
        assert staged is not None, subscriber.health()
        assert torch.equal(staged.tensors["w"], stepped(version)["w"])
        assert staged.wire in ("tcp+delta", "tcp")  # without the connection there is no base at the source
        staged.ack()


@pytest.mark.parametrize("offset", [0, 3, 40, 200])
def test_a_flipped_bit_in_a_manifest_costs_the_broadcast_and_not_the_version(
    publish_to, subscribe, monkeypatch, offset
):
    options = {"chunk_bytes": 4 << 10, "wires": ("tcp",), "collective": "gloo"}
    publisher, subscriber = publish_to(stepped(0), **options), subscribe(stepped(0), **options)
    publisher.publish(0, stepped(0))
    staged = subscriber.next(timeout=20)
    assert staged is not None, subscriber.health()
    assert staged.wire == "collective"
    staged.ack()
    encode = Manifest.encode

    def flipped(manifest: Manifest) -> bytes:
        encoded = bytearray(encode(manifest))
        encoded[offset] ^= 16
        return bytes(encoded)

    monkeypatch.setattr(Manifest, "encode", flipped)
    publisher.publish(1, stepped(1))
    staged = subscriber.next(after=0, timeout=20)
    assert staged is not None, subscriber.health()
    assert staged.wire == "tcp"
    assert torch.equal(staged.tensors["w"], stepped(1)["w"])
    staged.ack()
