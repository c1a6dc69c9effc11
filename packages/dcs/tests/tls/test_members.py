"""Publishers and subscribers that speak TLS to each other."""

import dataclasses

import dcs
import pytest
import torch

TENSORS = {"w": torch.arange(3_000_000, dtype=torch.float32)}


def test_versions_travel_over_tls(publish_to, subscribe, trainer, engine):
    publisher = publish_to(TENSORS, tls=trainer, token="secret")
    receivers = [
        subscribe(TENSORS, f"engine-{place}", tls=engine, wires=("tcp",), token="secret", streams=2)
        for place in range(2)
    ]
    for version in (1, 2):
        ticket = publisher.publish(version, {"w": TENSORS["w"] + version})
        for receiver in receivers:
            got = receiver.fetch(version, timeout=20)
            assert torch.equal(got["w"], TENSORS["w"] + version)
        assert set(ticket.wait(20).acked) == {"engine-0", "engine-1"}


def test_who_has_no_certificate_gets_nothing_and_is_told(publish_to, subscribe, trainer, eventually):
    publish_to(TENSORS, tls=trainer).publish(1, TENSORS)
    plain = subscribe(TENSORS, wires=("tcp",))
    eventually(lambda: "TLS only" in str(plain.health().error))
    assert plain.next(timeout=0.05) is None


def test_who_has_a_strange_certificate_gets_nothing_and_is_told(
    publish_to, subscribe, trainer, stranger, authority, eventually
):
    publish_to(TENSORS, tls=trainer).publish(1, TENSORS)
    impostor = dataclasses.replace(stranger.member("impostor3"), authority=authority.certificate)
    receiver = subscribe(TENSORS, tls=impostor, wires=("tcp",))
    eventually(lambda: isinstance(receiver.health().error, dcs.Unauthorized))
    with pytest.raises(dcs.Unauthorized, match="does not accept the certificate of this side"):
        receiver.next(timeout=0.05)


def test_a_publisher_without_certificates_is_not_trusted(publish_to, subscribe, engine, eventually):
    publish_to(TENSORS).publish(1, TENSORS)
    receiver = subscribe(TENSORS, tls=engine, wires=("tcp",))
    eventually(lambda: "answered without TLS" in str(receiver.health().error))
    assert receiver.next(timeout=0.05) is None
