"""At which address a member of a run is reached by its peers."""

import socket

import pytest
from relax.config import resolve
from relax.distributed.weights import own_address
from relax.orchestration.services import host_of


def test_to_a_coordinator_on_loopback_it_is_loopback():
    assert own_address("tcp://127.0.0.1:4000") == "127.0.0.1"


def test_to_one_on_another_machine_it_is_an_address_that_can_be_listened_at():
    try:
        found = own_address("tcp://198.51.100.1:4000")  # of a network for documentation; nothing is sent
    except OSError as error:
        pytest.skip(f"this machine has no way to another one: {error}")
    with socket.socket() as listener:
        listener.bind((found, 0))
    assert not found.startswith("127.")


def test_services_are_on_loopback_unless_the_run_is_on_a_cluster():
    def host(**ray):
        return host_of(resolve({"data": {"path": "d"}, "ray": ray}, {}, "a test"))

    assert host() == "127.0.0.1"
    assert host(address="10.0.0.5:6379", host="10.0.0.5") == "10.0.0.5"
    assert host(host="10.0.0.5") == "127.0.0.1"  # a Ray of its own: no other machine has a part in it
