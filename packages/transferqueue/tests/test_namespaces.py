"""Two network namespaces as two hosts: the store in one, its clients in the other."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

SERVER = """
import json, sys, transferqueue as tq
curve = sys.argv[2] == "curve"
with tq.serve(2, host=sys.argv[1], token="secret", curve=curve) as store, tq.connect(store) as queue:
    part = queue.partition("p", tasks={"t": ["x"]})
    print(json.dumps([store.address, store.server_key, queue.transport]), flush=True)
    for line in sys.stdin:
        stats = queue.stats()
        print(json.dumps({
            "granted": stats.memory.granted, "pinned": stats.memory.pinned_only, "clients": stats.clients,
            "samples": stats.partitions["p"].samples, "leased": len(part.ledger("t").leased),
        }), flush=True)
"""


@dataclass
class Host:
    """A network namespace with one address."""

    name: str
    address: str

    def python(self, program: str, *arguments: str, **options: Any) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            ["ip", "netns", "exec", self.name, sys.executable, "-c", program, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            **options,
        )

    def runs(self, program: str, *arguments: str) -> Any:
        """What a program prints, which is JSON."""
        with self.python(program, *arguments) as process:
            said, _ = process.communicate(timeout=100)
            assert process.returncode == 0
        return json.loads(said)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=20)


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Host, Host]]:
    if os.getuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the command ip of iproute2")
    number = os.getpid() % 10_000
    there = Host(f"tq-there-{number}", "10.213.77.1")
    here = Host(f"tq-here-{number}", "10.213.77.2")
    try:
        ip("netns", "add", there.name)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespace can be made here: {error.stderr.decode().strip()}")
    try:
        ip("netns", "add", here.name)
        ends = [f"tqa{number}", f"tqb{number}"]
        ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for host, end in ((there, ends[0]), (here, ends[1])):
            ip("link", "set", end, "netns", host.name)
            ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", end)
            ip("-n", host.name, "link", "set", end, "up")
            ip("-n", host.name, "link", "set", "lo", "up")
        yield there, here
    finally:
        for host in (there, here):
            subprocess.run(["ip", "netns", "del", host.name], check=False, capture_output=True, timeout=20)


class Store:
    def __init__(self, host: Host, curve: str) -> None:
        self.process = host.python(SERVER, host.address, curve)
        assert self.process.stdout is not None
        self.address, self.key, self.transport = json.loads(self.process.stdout.readline())

    def stats(self) -> dict[str, int]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert self.process.wait(20) == 0
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture(scope="module")
def encrypted(hosts: tuple[Host, Host]) -> Iterator[Store]:
    store = Store(hosts[0], "curve")
    yield store
    store.close()


@pytest.fixture(scope="module")
def plain(hosts: tuple[Host, Host]) -> Iterator[Store]:
    store = Store(hosts[0], "plain")
    yield store
    store.close()


CLIENT = """
import json, sys, time, numpy as np, transferqueue as tq
address, key = sys.argv[1:]
with tq.connect(address, "secret", server_key=key or None) as queue:
    part = queue.partition("p")
    value = np.random.default_rng(0).integers(0, 1 << 62, (16, 250_000))
    begin = time.perf_counter()
    part.put({"x": list(value)})
    put = time.perf_counter()
    batch = part.fetch("t", 16)
    rows = list(batch["x"])
    got = time.perf_counter()
    same = all(np.array_equal(a, b) for a, b in zip(rows, value, strict=True))
    batch.ack()
    megabytes = value.nbytes / 1e6
    rates = [megabytes / (put - begin), megabytes / (got - put)]
    print(json.dumps([queue.transport, queue.transport_notes, same, *rates]))
"""


def test_over_curve_everything_works_and_shared_memory_is_not_taken(
    hosts: tuple[Host, Host], encrypted: Store
) -> None:
    assert encrypted.transport == "shm"  # of the client beside the store
    transport, notes, same, put, get = hosts[1].runs(CLIENT, encrypted.address, encrypted.key)
    assert (transport, same) == ("zmq", True)
    assert any(note.startswith("shm: the store is not on this host") for note in notes)
    print(f"two namespaces, CURVE, 32 MB: put {put:.0f} MB/s, fetch {get:.0f} MB/s")
    assert min(put, get) > 1


def test_without_encryption_too(hosts: tuple[Host, Host], plain: Store) -> None:
    transport, _, same, put, get = hosts[1].runs(CLIENT, plain.address, "")
    assert (transport, same) == ("zmq", True)
    print(f"two namespaces, plain, 32 MB: put {put:.0f} MB/s, fetch {get:.0f} MB/s")


REFUSED = """
import asyncio, json, sys, time, transferqueue as tq
address, token, key, transport = sys.argv[1:]
kinds, begin = [], time.monotonic()
try:
    tq.connect(address, token or None, server_key=key or None, transport=transport, reconnect_seconds=50)
except tq.QueueError as error:
    kinds.append([type(error).__name__, str(error)])

async def main():
    try:
        await tq.connect_async(
            address, token or None, server_key=key or None, transport=transport, reconnect_seconds=50
        )
    except tq.QueueError as error:
        kinds.append([type(error).__name__, str(error)])

asyncio.run(main())
print(json.dumps([kinds, time.monotonic() - begin]))
"""
OTHER_KEY = "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"


@pytest.mark.parametrize(
    ("what", "token", "key", "says"),
    [
        ("encrypted", "secret", "", "key"),
        ("encrypted", "secret", OTHER_KEY, "key"),
        pytest.param("plain", "secret", OTHER_KEY, "key", marks=pytest.mark.slow),
        ("encrypted", "wrong", None, "token"),
        pytest.param("encrypted", "", None, "token", marks=pytest.mark.slow),
        pytest.param("plain", "wrong", "", "token", marks=pytest.mark.slow),
    ],
)
def test_a_wrong_key_or_token_is_refused_at_once(
    what: str,
    token: str,
    key: str | None,
    says: str,
    hosts: tuple[Host, Host],
    request: pytest.FixtureRequest,
) -> None:
    store: Store = request.getfixturevalue(what)
    kinds, seconds = hosts[1].runs(REFUSED, store.address, token, store.key if key is None else key, "auto")
    assert [kind for kind, _ in kinds] == ["Unauthorized"] * 2, kinds
    assert all(says in message for _, message in kinds)
    assert seconds < 40  # who takes it for a server that is away tries for 50
    assert hosts[1].runs(CLIENT, store.address, store.key or "")[2]  # nobody else is disturbed


def test_shared_memory_cannot_be_insisted_on(hosts: tuple[Host, Host], plain: Store) -> None:
    kinds, _ = hosts[1].runs(REFUSED, plain.address, "secret", "", "shm")
    assert all("not on this host" in message for _, message in kinds)
    assert len(kinds) == 2


HOLDING = """
import os, sys, numpy as np, transferqueue as tq
from transferqueue.client import calls
queue = tq.connect(sys.argv[1], "secret", server_key=sys.argv[2] or None)
part = queue.partition("p")
part.put({"x": [np.arange(3)] * 3})
batch = part.fetch("t", 3, lease_seconds=5)
write = calls.write_block
def hold(*arguments, **named):
    print("holding", flush=True)
    sys.stdin.readline()
calls.write_block = hold
part.put({"x": [np.zeros(200_000, np.int64)]})
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", ["killed", "unplugged"])
def test_what_a_client_of_a_lost_host_holds_comes_back(
    end: str, hosts: tuple[Host, Host], encrypted: Store
) -> None:
    """In seconds if its process dies, within a minute if its host falls silent."""
    _, here = hosts
    before = encrypted.stats()
    with here.python(HOLDING, encrypted.address, encrypted.key) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == "holding\n"
        held = encrypted.stats()
        assert held["granted"] > before["granted"]
        assert held["leased"] == 3
        began = time.monotonic()
        if end == "unplugged":
            ip("-n", here.name, "link", "set", f"tqb{os.getpid() % 10_000}", "down")
        else:
            client.kill()
        try:
            while (now := encrypted.stats())["granted"] > before["granted"] or now["leased"]:
                assert time.monotonic() - began < 60, now
                time.sleep(0.2)
        finally:
            client.kill()
            if end == "unplugged":
                ip("-n", here.name, "link", "set", f"tqb{os.getpid() % 10_000}", "up")
        print(f"{end}: everything back after {time.monotonic() - began:.1f} s")
        assert end == "unplugged" or time.monotonic() - began < 15


def test_ucx_is_not_taken_without_saying_why(hosts: tuple[Host, Host], plain: Store) -> None:
    program = """
import json, sys, transferqueue as tq
with tq.connect(sys.argv[1], "secret") as queue:
    print(json.dumps([queue.transport, queue.transport_notes]))
"""
    transport, notes = hosts[1].runs(program, plain.address)
    assert transport in ("zmq", "ucx")
    assert transport == "ucx" or notes
