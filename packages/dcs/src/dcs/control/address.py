"""Which addresses may be bound, and how they are written."""

import ipaddress

from dcs.errors import Unauthorized


def is_loopback(host: str) -> bool:
    """Whether `host` can only be reached from this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def require_token(host: str, token: str | None, what: str) -> None:
    """Raise `Unauthorized` when `what` would listen off loopback without a token, or with an empty one."""
    if token == "":
        raise Unauthorized(f"{what} was given an empty token; give a secret, or None on loopback")
    if token is None and not is_loopback(host):
        raise Unauthorized(
            f"{what} would bind {host!r}, which is not loopback, without a token; give token=..."
        )
