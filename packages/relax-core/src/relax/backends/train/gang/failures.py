"""Which errors of a collective only say that another rank is gone."""

import torch.distributed

_SIGNS = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Socket closed")
_GROUPS = ("gloo", "nccl", "rank", "store")


def is_consequence(error: BaseException) -> bool:
    """Whether an error follows from the end of another rank, rather than being a cause of its own."""
    if isinstance(error, torch.distributed.DistError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and (
        any(sign in text for sign in _SIGNS)
        or ("imed out" in text and any(w in text.lower() for w in _GROUPS))
    )
