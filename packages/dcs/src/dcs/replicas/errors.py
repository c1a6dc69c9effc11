"""What replicas refuse or lose, beside the exceptions of `dcs.errors`."""

from dcs.errors import CorruptChunk, DcsError
from dcs.errors import from_refusal as _from_refusal


class KeeperLost(DcsError, ConnectionError):
    """No keeper can be reached, or none took a shard; the message says what each one answered."""

    code = "keeper_lost"


class KeeperFull(DcsError):
    """A keeper has no room for a shard within its `max_bytes`; what it holds already it keeps."""

    code = "keeper_full"


class WorldSizeMismatch(DcsError, ValueError):
    """The shards held were saved by another number of ranks than there are now."""

    code = "world_size"


class UnsupportedLeaf(DcsError, TypeError):
    """A tree has something in it that cannot be kept bit for bit; the message names the path and the type."""

    code = "unsupported_leaf"


_OWN: dict[str, type[DcsError]] = {
    kind.code: kind for kind in (KeeperLost, KeeperFull, WorldSizeMismatch, CorruptChunk)
}


def from_refusal(code: str, message: str) -> DcsError:
    """The exception that a keeper's refusal stands for."""
    return _OWN[code](message) if code in _OWN else _from_refusal(code, message, {})
