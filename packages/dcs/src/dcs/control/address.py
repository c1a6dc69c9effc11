"""Which addresses may be bound, and how they are written."""

import ipaddress

from dcs.arguments import require_host, require_secret
from dcs.errors import InvalidArgument, Unauthorized

TOKEN_VARIABLE = "DCS_TOKEN"


def is_loopback(host: str) -> bool:
    """Whether `host` can only be reached from this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def require_reachable(host: str, advertise: str | None, what: str) -> None:
    """Raise `DcsError` when `what` would listen on all addresses and tell nobody which of them to use."""
    if advertise is not None:
        require_host(advertise, "advertise")
    if host in ("0.0.0.0", "::", "") and advertise is None:
        raise InvalidArgument(
            f"{what} would listen on all addresses ({host!r}) and others have to be told one of them: give"
            " advertise=..., or the address itself as host"
        )


def require_token(host: str, token: str | None, what: str, way: str = "give token=...") -> None:
    """Raise `Unauthorized` when `what` would listen off loopback without a token, or with an empty one.

    Args:
        way: how whoever reads the error gives one: a command takes it from the environment.
    """
    require_secret(token, what)
    if token == "":
        raise Unauthorized(f"{what} was given an empty token; {way}, or none on loopback")
    if token is None and not is_loopback(host):
        raise Unauthorized(f"{what} would bind {host!r}, which is not loopback, without a token; {way}")


def require_token_of_command(host: str, token: str | None, what: str) -> None:
    """The same for what a person has typed."""
    require_token(host, token, what, f"set the environment variable {TOKEN_VARIABLE}")
