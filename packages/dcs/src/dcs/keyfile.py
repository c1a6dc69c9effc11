"""A coordinator's CURVE keys in files: the secret one for its user only, the public one for its members."""

import os
from pathlib import Path

import zmq

from dcs.control.curve import CoordinatorKeys, generate
from dcs.errors import DcsError

_MOST_BYTES = 4096


def write(path: str | os.PathLike[str]) -> bytes:
    """Make a pair: the secret key in a new file `path` of mode 0600, the public one in `path` + ".pub".

    Returns the public key, which members are given. Raises `DcsError` when a file exists already or cannot
    be written; nothing is left behind then.
    """
    keys = generate()
    secret, public = Path(path), Path(f"{os.fspath(path)}.pub")
    _create(secret, keys.secret, 0o600)
    try:
        _create(public, keys.public, 0o644)
    except DcsError:
        secret.unlink()
        raise
    return keys.public


def read(path: str | os.PathLike[str]) -> CoordinatorKeys:
    """The pair whose secret key is in a file. Raises `DcsError` when it cannot be read or is no key."""
    try:
        with open(path, "rb") as file:
            secret = file.read(_MOST_BYTES).strip()
    except OSError as error:
        raise DcsError(
            f"cannot read the secret key {os.fspath(path)}: {error.strerror}; `dcs keygen FILE` makes one"
        ) from error
    try:
        return CoordinatorKeys(zmq.curve_public(secret), secret)
    except (ValueError, zmq.ZMQError) as error:
        raise DcsError(
            f"{os.fspath(path)} holds no CURVE secret key (40 characters of Z85); `dcs keygen FILE` makes one"
        ) from error


def _create(path: Path, key: bytes, mode: int) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    except FileExistsError as error:
        raise DcsError(f"{path} exists already; choose another name, so that no key is lost") from error
    except OSError as error:
        raise DcsError(f"cannot write the key {path}: {error.strerror}") from error
    with open(descriptor, "wb") as file:
        file.write(key + b"\n")
