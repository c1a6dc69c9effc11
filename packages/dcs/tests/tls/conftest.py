"""Certificates by the `openssl` command, and two ends of a connection."""

import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from dcs.wire import streams
from dcs.wire.tls import Tls


@dataclass(frozen=True)
class Authority:
    """A certificate authority in a folder."""

    folder: Path

    @property
    def certificate(self) -> Path:
        return self.folder / "ca.pem"

    def member(self, name: str, *, days: int = 2, address: str = "127.0.0.1", **options: bool) -> Tls:
        """A member with a certificate for `address` that this authority has signed."""
        key, certificate = self.folder / f"{name}.key", self.folder / f"{name}.pem"
        request, extensions = self.folder / f"{name}.csr", self.folder / f"{name}.ext"
        extensions.write_text(f"subjectAltName=IP:{address}\n")
        _openssl("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
                 "-keyout", key, "-out", request, "-subj", f"/CN={name}")  # fmt: skip
        _openssl("x509", "-req", "-in", request, "-CA", self.certificate, "-CAkey", self.folder / "ca.key",
                 "-CAcreateserial", "-days", days, "-extfile", extensions, "-out", certificate)  # fmt: skip
        return Tls(certificate, key, self.certificate, **options)


def _openssl(*arguments: object) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True, timeout=60)


@pytest.fixture(scope="session")
def new_authority(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Authority]:
    """`new_authority(name)` makes one."""
    if shutil.which("openssl") is None:
        pytest.skip("the openssl command, which makes the certificates of these tests, is not installed")

    def make(name: str) -> Authority:
        folder = tmp_path_factory.mktemp(name)
        _openssl("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
                 "-keyout", folder / "ca.key", "-out", folder / "ca.pem", "-days", 2,
                 "-subj", f"/CN={name}")  # fmt: skip
        return Authority(folder)

    return make


@pytest.fixture(scope="session")
def openssl() -> Callable[..., None]:
    """Runs the command."""
    return _openssl


@pytest.fixture(scope="session")
def authority(new_authority: Callable[[str], Authority]) -> Authority:
    return new_authority("ours")


@pytest.fixture(scope="session")
def stranger(new_authority: Callable[[str], Authority]) -> Authority:
    return new_authority("theirs")


@pytest.fixture(scope="session")
def trainer(authority: Authority) -> Tls:
    return authority.member("trainer")


@pytest.fixture(scope="session")
def engine(authority: Authority) -> Tls:
    return authority.member("engine")


@pytest.fixture
def make_ends(stack: ExitStack) -> Callable[[], tuple[socket.socket, socket.socket]]:
    """`make_ends()` is a TCP connection: the side that connected, and the side that accepted."""

    def make() -> tuple[socket.socket, socket.socket]:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            near = stack.enter_context(socket.create_connection(listener.getsockname(), 10))
            far = stack.enter_context(listener.accept()[0])
        for sock in (near, far):
            streams.set_deadlines(sock, 20)
        return near, far

    return make


@pytest.fixture
def ends(make_ends: Callable[[], tuple[socket.socket, socket.socket]]) -> tuple[socket.socket, socket.socket]:
    return make_ends()


@pytest.fixture
def beside() -> Iterator[ThreadPoolExecutor]:
    """Runs the other side."""
    with ThreadPoolExecutor(2) as threads:
        yield threads
