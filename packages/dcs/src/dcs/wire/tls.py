"""TLS 1.3 for chunk connections: who a member is, whom it trusts, and the handshake on a blocking socket.

The side that serves: `refuse_plain`, `wrap`, `handshake`. The side that connects: `wrap` with the host,
`handshake`. Wrapping and shaking hands are two steps because a socket changes hands in `wrap`: whoever may
have to `streams.cut` the connection can take the new one before anything blocks.
"""

import os
import socket
import ssl
import time
from dataclasses import dataclass
from typing import NoReturn

from dcs.arguments import shown
from dcs.errors import DcsError, InvalidArgument, ProtocolError, Timeout, Unauthorized
from dcs.wire import frames, streams

HANDSHAKE_SECONDS = 5.0

_TLS_HANDSHAKE = b"\x16"  # the first byte of every TLS connection
_ADMITTED = b"\x01"


@dataclass(frozen=True)
class Tls:
    """A member's certificate, and whose certificates it accepts. All files are PEM.

    Attributes:
        certificate: this member's own, followed by the intermediate ones if there are any.
        key: its private key, not encrypted; readable by this user only.
        authority: the certificates of those who sign members. Both sides of every connection then have to
            show a certificate of theirs. Without, only the side that serves shows one, and the other checks
            it as a browser does: by the authorities that this machine trusts, and for the host.
        check_host: whether the certificate of the side that serves has to name the address it was reached at
            also when there is an `authority`. Without one it always has to.
        verify_peer: False takes any certificate: nobody can listen, but somebody in the middle can, and gets
            the token too. For tests of a network only.
    """

    certificate: str | os.PathLike[str]
    key: str | os.PathLike[str]
    authority: str | os.PathLike[str] | None = None
    check_host: bool = False
    verify_peer: bool = True

    def __post_init__(self) -> None:
        for name in ("certificate", "key", "authority"):
            path = getattr(self, name)
            if not isinstance(path, str | os.PathLike) and not (name == "authority" and path is None):
                raise InvalidArgument(
                    f"{name} of a Tls is {shown(path)}; it has to be the path of a PEM file"
                )
        if not self.verify_peer and (self.authority is not None or self.check_host):
            raise DcsError(
                "verify_peer is False, so neither authority nor check_host can have an effect; leave those"
                " out, or leave verify_peer True"
            )


def server_context(tls: Tls) -> ssl.SSLContext:
    """For the connections that a member accepts. Make it once; it is meant to be shared by threads.

    Raises `DcsError` naming the file that is missing, unreadable or does not fit.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # connections live long; tickets nobody reads would reset a short one
    _load_own(context, tls)
    if tls.authority is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        _load_authority(context, tls.authority)
    return context


def client_context(tls: Tls) -> ssl.SSLContext:
    """For the connections that a member opens; as `server_context`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # checks certificate and host
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    _load_own(context, tls)
    if tls.authority is not None:
        context.check_hostname = tls.check_host
        _load_authority(context, tls.authority)
    elif tls.verify_peer:
        context.load_default_certs()
    else:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def refuse_plain(sock: socket.socket, peer: str, seconds: float = HANDSHAKE_SECONDS) -> None:
    """On an accepted socket, before `wrap`: tells a peer that speaks without TLS so, in words it can read.

    Returns when the peer begins a TLS handshake. Raises `ProtocolError` when it does not (it has been told),
    `BlockingIOError` when nothing came in time, and `OSError`.
    """
    streams.set_deadlines(sock, seconds)
    first = sock.recv(1, socket.MSG_PEEK)
    if first == _TLS_HANDSHAKE:
        return
    if not first:
        raise ConnectionResetError(f"{peer} hung up before it said anything")
    # The hello has to be read whole: closing with unread bytes resets the connection, and the answer is lost.
    frames.receive_hello(sock, peer)
    error = ProtocolError("this side serves with TLS only; give tls=Tls(certificate, key, authority)")
    frames.send_hello(sock, frames.Refusal(error.code, str(error)))
    raise ProtocolError(f"{peer} spoke without TLS; this side serves with TLS only")


def wrap(sock: socket.socket, context: ssl.SSLContext, host: str | None = None) -> ssl.SSLSocket:
    """The same connection as a TLS one; nothing moves yet, and `sock` is of no more use.

    Args:
        host: that was connected to; None for the side that accepted. Raises `OSError`.
    """
    return context.wrap_socket(
        sock, server_side=host is None, server_hostname=host, do_handshake_on_connect=False
    )


def handshake(stream: ssl.SSLSocket, peer: str, seconds: float = HANDSHAKE_SECONDS) -> None:
    """Agree on keys and check certificates; when it returns, both sides have accepted each other.

    Args:
        peer: who is at the other end, for errors.
        seconds: for all of it.

    Raises `Unauthorized` (a certificate was not accepted, on either side), `ProtocolError` (the peer speaks
    no TLS), `Timeout`, and `OSError` (it hung up). The caller closes the socket.
    """
    deadline = time.monotonic() + seconds
    try:
        stream.settimeout(seconds)
        stream.do_handshake()
        stream.settimeout(max(0.001, deadline - time.monotonic()))
        # The client is done before the server has seen its certificate, so the server says that it likes it.
        if stream.server_side:
            stream.sendall(_ADMITTED)
        elif stream.recv(1) != _ADMITTED:
            raise ssl.SSLEOFError
    except TimeoutError as error:
        raise Timeout(f"{peer} did not finish a TLS handshake within {seconds} s") from error
    except ssl.SSLError as error:
        _explain(error, peer)
    except ConnectionError as error:
        raise ConnectionResetError(_hung_up(peer)) from error


def _explain(error: ssl.SSLError, peer: str) -> NoReturn:
    reason = error.reason or ""
    if isinstance(error, ssl.SSLCertVerificationError):
        raise Unauthorized(
            f"the certificate of {peer} is not accepted here: {error.verify_message}; it has to be signed by"
            " the authority that this side was given"
        ) from error
    if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        raise Unauthorized(
            f"{peer} showed no certificate; give it tls=Tls(...) with the same authority"
        ) from error
    if "ALERT" in reason and ("CERTIFICATE" in reason or "UNKNOWN_CA" in reason):
        said = reason.partition("ALERT_")[2].replace("_", " ").lower()
        raise Unauthorized(
            f"{peer} does not accept the certificate of this side ({said}); it has to be signed by the"
            " authority that the other side was given"
        ) from error
    if reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST"):
        raise ProtocolError(f"{peer} answered without TLS; give tls=... to both sides, or to none") from error
    if isinstance(error, ssl.SSLEOFError):
        raise ConnectionResetError(_hung_up(peer)) from error
    raise ProtocolError(f"TLS with {peer} failed: {error}") from error


def _hung_up(peer: str) -> str:
    return f"{peer} hung up during the TLS handshake; does it serve with TLS, and trust the same authority?"


def _load_own(context: ssl.SSLContext, tls: Tls) -> None:
    def password() -> NoReturn:
        raise DcsError(f"the key {tls.key} is encrypted; give one that is not, in a file of mode 0600")

    for path in (tls.certificate, tls.key):
        _readable(path)
    try:
        context.load_cert_chain(tls.certificate, tls.key, password)
    except ssl.SSLError as error:
        raise DcsError(
            f"{tls.certificate} and {tls.key} are no PEM certificate with its private key: {error}"
        ) from error


def _load_authority(context: ssl.SSLContext, path: str | os.PathLike[str]) -> None:
    _readable(path)
    try:
        context.load_verify_locations(cafile=path)
    except ssl.SSLError as error:
        raise DcsError(f"the authority {path} is no PEM file of certificates: {error}") from error


def _readable(path: str | os.PathLike[str]) -> None:
    try:
        with open(path, "rb"):
            return
    except OSError as error:
        raise DcsError(f"cannot read {os.fspath(path)}, given for TLS: {error.strerror}") from error
