"""Arguments that cannot be meant: each is named, with what is expected, and nothing is left open."""

import contextlib
import inspect
import subprocess
import sys
from typing import Any

import dcs
import pytest
import torch
from dcs import replicas
from dcs.introspection import IntrospectionServer

LAYOUT = dcs.layout.of({"w": torch.zeros(4)})
SECRET = "this is my secret"
WRONG = [
    None,
    3,
    -1,
    1.5,
    float("nan"),
    float("inf"),
    "",
    b"x",
    [],
    ["x"],
    {},
    object(),
    True,
    "\ud800",
    1 << 70,
]
RIGHT = {  # of the wrong ones: what a parameter takes nevertheless
    "port": {3, 0},
    "lease_seconds": {3, 1.5, 1 << 70},
    "transfer_seconds": {None, 3, 1.5, 1 << 70},
    "max_bytes": {None, 3, 1 << 70},
    "connect_seconds": {3, 1.5, 1 << 70},
    "block_seconds": {3, 1.5, 1 << 70},
    "supersede_after": {3, 1.5, 1 << 70},
    "timeout": {3, 1.5, 1 << 70},
    "collective_seconds": {3, 1.5, 1 << 70},
    "keep": {3, 1 << 70},
    "streams": {3},
    "collective": {""},
    "group": {""},
    "site": {""},
    **{name: {None} for name in ("token", "session", "curve", "tls", "device", "advertise", "domain")},
    "progress": {None},
    "authority": {None, "", "\ud800"},  # a path may be anything
    "certificate": {"", "\ud800"},
    "key": {"", "\ud800"},
}
FLAGS = {"relay", "serve", "delta", "share_memory", "check_host", "verify_peer"}  # any value is true or false


@pytest.fixture(scope="module")
def given():
    """By class: how it is made, and with what."""
    with dcs.Coordinator() as coordinator, replicas.Keeper() as keeper:
        yield {
            "Publisher": (dcs.Publisher, {"address": coordinator.address, "layout": LAYOUT}),
            "Subscriber": (dcs.Subscriber, {"address": coordinator.address, "name": "e", "layout": LAYOUT}),
            "Coordinator": (dcs.Coordinator, {}),
            "Keeper": (replicas.Keeper, {}),
            "Replicas": (replicas.Replicas, {"keepers": [keeper.address], "name": "n", "copies": 1}),
            "IntrospectionServer": (IntrospectionServer, {"coordinator": coordinator}),
            "Tls": (dcs.Tls, {"certificate": "a", "key": "b"}),
            "MemberKeys": (dcs.MemberKeys.of, {"server_public": b"x" * 40}),
            "CoordinatorKeys": (dcs.CoordinatorKeys, {"public": b"x" * 40, "secret": b"y" * 40}),
        }


def is_right(name: str, value: Any) -> bool:
    return any(
        value is right or (type(value) is type(right) and value == right) for right in RIGHT.get(name, ())
    )


CLASSES = ["Publisher", "Subscriber", "Coordinator", "Keeper", "Replicas", "IntrospectionServer"]


@pytest.mark.parametrize("made", [*CLASSES, "Tls", "MemberKeys", "CoordinatorKeys"])
def test_a_wrong_argument_is_named_and_nothing_is_left_open(given, made, no_leak):
    make, right = given[made]
    tried = 0
    for name in inspect.signature(make).parameters:
        for value in WRONG:
            if name in FLAGS or is_right(name, value):
                continue
            tried += 1
            with pytest.raises(dcs.DcsError) as refused:  # noqa: PT012
                made_so = make(**(right | {name: value}))
                pytest.fail(f"{made} took {name}={value!a}: {made_so}")
            words = str(refused.value)
            other = {"keepers": "keeper", "server_public": "server public", "world_size": "session"}
            told = (name, name.replace("_", " "), other.get(name, name))
            assert any(word in words for word in told), f"{name}={value!a}: {words}"
    assert tried > 10


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"address": None}, "address is None; it has to be a string such as 'tcp://"),
        ({"tls": "path/to/cert.pem"}, r"give dcs\.Tls\(certificate, key, authority\), or None"),
        ({"curve": "path/to/key.pub"}, r"give dcs\.MemberKeys\.of\(the coordinator's public key\), or None"),
        ({"host": "tcp://10.0.0.1"}, "host is 'tcp://10.0.0.1'; it has to be a host's name or address"),
        ({"timeout": float("nan")}, "timeout is nan; it has to be a positive number of seconds"),
    ],
)
def test_the_way_out_is_named(given, options, words):
    for made in ("Publisher", "Subscriber"):
        make, right = given[made]
        with pytest.raises(dcs.InvalidArgument, match=words):
            make(**(right | options))


def test_one_keeper_is_no_list_of_them():
    with pytest.raises(dcs.InvalidArgument, match=r"keepers is 'tcp://127.0.0.1:1'; .* \['tcp://"):
        replicas.Replicas("tcp://127.0.0.1:1", "actor")


def test_a_token_that_is_none_is_not_shown(given):
    with pytest.raises(dcs.InvalidArgument, match=r"the token of .* is a bytes") as refused:
        dcs.Coordinator(token=SECRET.encode())  # pyright: ignore[reportArgumentType]
    assert SECRET not in str(refused.value)


def test_waits_take_numbers_only_and_below_zero_is_now(publish_to, subscribe):
    publisher, subscriber = publish_to({"w": torch.zeros(4)}), subscribe({"w": torch.zeros(4)})
    ticket = publisher.publish(0, {"w": torch.zeros(4)})
    subscriber.fetch(0)
    for wait in (ticket.wait, lambda timeout: subscriber.next(0, timeout)):
        for wrong in (None, "soon", float("nan")):
            with pytest.raises(dcs.InvalidArgument, match=r"timeout is .*; it has to be a number of seconds"):
                wait(wrong)
    assert subscriber.next(0, -1.0) is None
    assert list(ticket.wait(float("inf")).acked) == ["engine-0"]
    with pytest.raises(dcs.InvalidArgument, match="version is '1'"):
        publisher.publish("1", {"w": torch.zeros(4)})
    with pytest.raises(dcs.InvalidArgument, match="apply is None; it has to be a function"):
        subscriber.follow(None)


def test_what_is_shown_of_a_version_fits_a_line(publish_to, subscribe):
    publisher, subscriber = publish_to({"w": torch.zeros(4)}), subscribe({"w": torch.zeros(4)})
    publisher.publish(0, {"w": torch.zeros(4)})
    staged = subscriber.next(timeout=10)
    assert staged is not None
    for shown in (
        publisher,
        subscriber,
        staged,
        dcs.layout.of({f"w{n}": torch.zeros(4) for n in range(500)}),
    ):
        assert len(repr(shown)) < 200, repr(shown)[:500]
    assert repr(staged).startswith("<Staged version 0 ")
    staged.ack()


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["serve", "--host", "0.0.0.0"], "without a token; set the environment variable DCS_TOKEN"),
        (["serve", "--http-port", "0", "--http-host", "0.0.0.0"], "set the environment variable DCS_TOKEN"),
        (["keeper", "--host", "0.0.0.0"], "without a token; set the environment variable DCS_TOKEN"),
        (["keeper", "--max-bytes", "lots"], "'lots' is no number of bytes; give one such as 64GiB"),
        (["keeper", "--max-bytes", "infGiB"], "'infGiB' is no number of bytes"),
        (["keeper", "--idle-seconds", "nan"], "idle_seconds is nan"),
        (["keeper", "--port", "99999"], "ports are 1 to 65535"),
    ],
)
def test_a_command_says_what_its_line_and_its_environment_lack(command, words, monkeypatch, capsys):
    from dcs.cli import main

    monkeypatch.delenv("DCS_TOKEN", raising=False)
    with contextlib.suppress(SystemExit):  # that of argparse
        assert main(command) == 1
    assert words in capsys.readouterr().err


SCARCE = """
import os, resource, sys, threading
import dcs, torch
from dcs import replicas
from dcs.introspection import IntrospectionServer

layout = dcs.layout.of({"w": torch.zeros(1000)})
coordinator, keeper = dcs.Coordinator().start(), replicas.Keeper().start()
make = {
    "publisher": lambda: dcs.Publisher(coordinator.address, "r", layout=layout, timeout=5),
    "subscriber": lambda: dcs.Subscriber(coordinator.address, "r", name="e", layout=layout, timeout=5),
    "coordinator": lambda: dcs.Coordinator().start(),
    "keeper": lambda: replicas.Keeper().start(),
    "http": lambda: IntrospectionServer(coordinator),
}
for each in make.values():  # whatever has to be imported is
    each().close()
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
for name, each in make.items():
    for spare in (1, 2, 6, 8, 13) if name in ("publisher", "subscriber", "coordinator") else (1, 2):
        threads, filling = threading.active_count(), []
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
        try:
            while True:
                filling.append(os.dup(0))
        except OSError:
            pass
        for _ in range(spare):
            os.close(filling.pop())
        before = len(filling)
        try:
            each().close()
            outcome = "made"
        except dcs.DcsError as error:
            outcome = type(error).__name__
        more = 0
        try:
            while True:
                filling.append(os.dup(0))
                more += 1
        except OSError:
            pass
        for descriptor in filling:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert more == spare, (name, spare, more, outcome)
        assert threading.active_count() == threads, (name, spare, outcome)
        print(name, spare, outcome)
    each().close()  # and now there are some
coordinator.close(), keeper.close()
"""


def test_without_descriptors_nothing_is_made_nothing_left_and_the_process_lives():
    """libzmq would end it: `Too many open files (src/epoll.cpp:38)`, and SIGABRT."""
    done = subprocess.run([sys.executable, "-c", SCARCE], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    outcomes = {line.rsplit(" ", 1)[1] for line in done.stdout.splitlines()}
    assert outcomes <= {"NoMemory", "made"}
    assert done.stdout.count("NoMemory") >= 17, done.stdout
