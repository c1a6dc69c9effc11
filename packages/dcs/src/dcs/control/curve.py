"""Keys for CurveZMQ, which encrypts what members and their coordinator say, and proves who the latter is.

Members show their token within; a key of theirs proves nothing to the coordinator. Keys are 40 characters of
Z85, as bytes.
"""

from dataclasses import dataclass, field

import zmq

from dcs.errors import DcsError

_KEY_CHARACTERS = 40


@dataclass(frozen=True, slots=True)
class CoordinatorKeys:
    """A coordinator's pair. Members are given `public`; `secret` stays with it.

    `dcs keygen` makes one in a file, which `dcs.keyfile.read` reads; `dcs.control.curve.generate` makes one.
    """

    public: bytes
    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        _check(public=self.public, secret=self.secret)

    def guard(self, socket: "zmq.Socket[bytes]") -> None:
        """Make a socket that is not yet bound demand encryption."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret)


@dataclass(frozen=True, slots=True)
class MemberKeys:
    """What a member needs: the coordinator's public key, and a pair of its own, which nobody has to know."""

    server_public: bytes
    public: bytes
    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        _check(server_public=self.server_public, public=self.public, secret=self.secret)

    @classmethod
    def of(cls, server_public: bytes) -> "MemberKeys":
        """With a new pair."""
        pair = generate()
        return cls(server_public, pair.public, pair.secret)

    def guard(self, socket: "zmq.Socket[bytes]") -> None:
        """Make a socket that is not yet connected speak to that coordinator only."""
        socket.setsockopt(zmq.CURVE_SERVERKEY, self.server_public)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret)


def generate() -> CoordinatorKeys:
    """A new pair. Raises `DcsError` when this libzmq was built without CURVE."""
    if not zmq.has("curve"):
        raise DcsError("this libzmq was built without CURVE; install pyzmq from its wheels")
    public, secret = zmq.curve_keypair()
    return CoordinatorKeys(public, secret)


def _check(**keys: bytes) -> None:
    for name, key in keys.items():
        if not isinstance(key, bytes) or len(key) != _KEY_CHARACTERS:
            raise DcsError(
                f"the {name.replace('_', ' ')} key is no CURVE key of {_KEY_CHARACTERS} characters of Z85, as"
                " bytes; make one with dcs.control.curve.generate()"
            )
