"""Two network namespaces as two hosts, with a long line between them: 100 ms there and back, 1 % loss."""

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
HERE = Path(__file__).parent
DELAY_SECONDS, LOSS = 0.05, 0.01  # one way; of packets
TOKEN = "between hosts"
PORT = 39_001


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=20)


@dataclass
class Host:
    """A network namespace: its name, its address, and the process there that forks members."""

    name: str
    address: str
    zygote: socket.socket

    def unplug(self) -> None:
        ip("-n", self.name, "link", "set", "dcs0", "down")

    def plug(self) -> None:
        ip("-n", self.name, "link", "set", "dcs0", "up")


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Host, Host, str]]:
    """Two hosts, and a further address of the first one, for what comes over the long line."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the command ip of iproute2")
    number = os.getpid() % 10_000
    names, addresses = [f"dcs-a-{number}", f"dcs-b-{number}"], ["10.213.79.1", "10.213.79.2"]
    with ExitStack() as stack:
        try:
            ip("netns", "add", names[0])
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespace can be made here: {error.stderr.decode().strip()}")
        stack.callback(ip, "netns", "del", names[0])
        ip("netns", "add", names[1])
        stack.callback(ip, "netns", "del", names[1])
        made = []
        first, second = [["netns", name] for name in names]
        ip("link", "add", "dcs0", *first, "type", "veth", "peer", "name", "dcs0", *second)
        for name, address in zip(names, addresses, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "dcs0")
            ip("-n", name, "link", "set", "dcs0", "up")
            ip("-n", name, "link", "set", "lo", "up")
            near, far = socket.socketpair()
            command = ["ip", "netns", "exec", name, sys.executable, str(HERE.parent / "member_process.py")]
            process = subprocess.Popen([*command, str(far.fileno())], pass_fds=[far.fileno()])
            stack.callback(process.wait, 20)
            stack.callback(near.shutdown, socket.SHUT_RDWR)  # ends it
            far.close()
            near.settimeout(60)
            made.append(Host(name, address, near))
        ip("-n", names[0], "addr", "add", "10.213.79.3/24", "dev", "dcs0")
        yield made[0], made[1], "10.213.79.3"


@pytest.fixture
def on(request: pytest.FixtureRequest, stack: ExitStack) -> Callable:
    """`on(host, role, ...)` is a member in a process on a host, and the line that it says first."""
    from_conftest = request.getfixturevalue("member_on")

    def make(host: Host, role: str, *arguments: object):
        texts = [each if isinstance(each, str) else json.dumps(each) for each in arguments]
        return from_conftest(host.zygote, role, *texts)

    return make


@pytest.fixture
def line(hosts, stack: ExitStack) -> Callable[[int], None]:
    """`line(port)` leads from the further address to the first host's port."""

    def make(port: int) -> None:
        first, _, further = hosts
        command = ["ip", "netns", "exec", first.name, sys.executable, str(HERE / "long_line.py")]
        process = stack.enter_context(
            subprocess.Popen(
                [*command, further, str(port), first.address, str(DELAY_SECONDS), str(LOSS)],
                stdout=subprocess.PIPE,
            )
        )
        stack.callback(process.kill)
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"

    return make


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Certificate, key and authority: one that has signed itself, which all members share."""
    if shutil.which("openssl") is None:
        pytest.skip("the openssl command, which makes the certificate of this test, is not installed")
    folder = tmp_path_factory.mktemp("tls")
    key, certificate = str(folder / "key.pem"), str(folder / "certificate.pem")
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
    ]
    command += ["-keyout", key, "-out", certificate, "-days", "2", "-subj", "/CN=member"]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return [certificate, key, certificate]


@pytest.fixture
def world(hosts, line, on) -> Callable:
    """`world(**options)`: a coordinator and a trainer on the first host, and `join(name, **options)`."""

    def make(**options):
        first, second, further = hosts
        coordinator = on(
            first, "coordinator", first.address, {"token": TOKEN, "port": PORT, "lease_seconds": 2.0}
        )
        coordinator.until("ready")
        line(PORT)
        here = f"tcp://{first.address}:{PORT}"
        common = {"token": TOKEN, "wires": ["tcp"], "chunk_bytes": 64 << 10} | options
        port = PORT + 1
        line(port)
        at = {"host": first.address, "port": port, "advertise": further}
        trainer = on(first, "trainer", here, "1000000", common | at, {})
        trainer.until("ready")

        def join(name: str, **more):
            there = {"host": second.address, "site": "remote", "timeout": 30} | common | more
            address = f"tcp://{further}:{PORT}"
            member = on(second, "engine", address, name, "1000000", there, {})
            member.until("ready")
            return member

        return trainer, join, coordinator

    return make


@pytest.mark.parametrize("encrypted", [False, True])
def test_several_streams_fill_a_line_that_one_cannot(hosts, world, digest, clock, certificate, encrypted):
    more = {"tls": certificate} if encrypted else {}
    trainer, join, coordinator = world(**more)
    seconds = {}
    for version, streams in enumerate((1, 8)):
        receiver = join(f"by-{streams}", streams=streams, serve=False)
        if version == 0:
            trainer.ask("publish", 0)
        receiver.takes(version)
        clock()
        trainer.ask("publish", version + 1)
        assert receiver.takes(version + 1)[0] == digest(version + 1)
        seconds[streams] = clock()
        receiver.kill()
    ratio = seconds[1] / seconds[8]
    print(f"3 MB over 100 ms and 1 % loss: 1 stream {seconds[1]:.2f} s, 8 streams {seconds[8]:.2f} s:"
          f" {ratio:.1f}x ({'TLS' if encrypted else 'plain'})")  # fmt: skip
    assert ratio >= 2
    coordinator.kill()


def test_a_remote_site_takes_a_version_once_and_comes_back_after_a_partition(
    hosts, world, digest, payload, certificate, eventually
):
    _, second, _ = hosts
    trainer, join, coordinator = world(tls=certificate)
    receivers = [join(f"e{index}") for index in range(3)]
    trainer.ask("publish", 0)
    for receiver in receivers:
        assert receiver.takes(0)[0] == digest(0)
    sent = int(trainer.ask("sent")[0]) / payload
    print(f"three receivers at the other side: root egress {sent:.2f} payloads")
    assert sent <= 1.05
    second.unplug()
    try:
        trainer.ask("publish", 1)
        for receiver in receivers:
            eventually(lambda receiver=receiver: receiver.ask("health")[0] == "lost", 30)
    finally:
        second.plug()
    for receiver in receivers:
        assert receiver.takes(1)[0] == digest(1)
    trainer.ask("publish", 2)
    for receiver in receivers:
        assert receiver.takes(2)[0] == digest(2)
    coordinator.kill()
