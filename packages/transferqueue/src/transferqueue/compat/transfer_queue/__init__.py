"""The calls of the PyPI package `transferqueue` 0.1.11 on this store::

    import transferqueue.compat.transfer_queue as tq  # was: import transfer_queue as tq

    tq.init()
    tq.kv_batch_put(keys=["a", "b"], partition_id="train", fields=fields, tags=[{"step": 0}, {"step": 0}])

Payload lies in a store of this package. Metadata, scheduling and a user's sampler live in a catalog, a
thread of the process that called `init` first. Neither Ray nor torch is needed to import this module; calls
that hand out tensors need torch and tensordict.
"""

import importlib
from typing import TYPE_CHECKING, Any

from .checkpoint import load_checkpoint, save_checkpoint
from .client import TransferQueueClient
from .config import Config
from .errors import (
    CatalogLost,
    ExtraMissing,
    FieldsNotReady,
    InvalidRequest,
    KeysNotFound,
    NotInitialized,
    RequestFailed,
    StorageKeyNotFoundError,
)
from .kv import (
    async_kv_batch_get,
    async_kv_batch_get_by_meta,
    async_kv_batch_put,
    async_kv_clear,
    async_kv_list,
    async_kv_put,
    kv_batch_get,
    kv_batch_get_by_meta,
    kv_batch_put,
    kv_clear,
    kv_list,
    kv_put,
)
from .metadata import BatchMeta, KVBatchMeta
from .sampler import (
    BaseSampler,
    GRPOGroupNSampler,
    RankAwareSampler,
    SeqlenBalancedSampler,
    SequentialSampler,
)
from .session import close, get_client, init

if TYPE_CHECKING:
    from .dataloader import StreamingDataLoader, StreamingDataset

__all__ = [
    "BaseSampler",
    "BatchMeta",
    "CatalogLost",
    "Config",
    "ExtraMissing",
    "FieldsNotReady",
    "GRPOGroupNSampler",
    "InvalidRequest",
    "KVBatchMeta",
    "KeysNotFound",
    "NotInitialized",
    "RankAwareSampler",
    "RequestFailed",
    "SeqlenBalancedSampler",
    "SequentialSampler",
    "StorageKeyNotFoundError",
    "StreamingDataLoader",
    "StreamingDataset",
    "TransferQueueClient",
    "async_kv_batch_get",
    "async_kv_batch_get_by_meta",
    "async_kv_batch_put",
    "async_kv_clear",
    "async_kv_list",
    "async_kv_put",
    "close",
    "get_client",
    "init",
    "kv_batch_get",
    "kv_batch_get_by_meta",
    "kv_batch_put",
    "kv_clear",
    "kv_list",
    "kv_put",
    "load_checkpoint",
    "save_checkpoint",
]

_NEED_TORCH = ("StreamingDataLoader", "StreamingDataset")


def __getattr__(name: str) -> Any:
    if name not in _NEED_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(f"{__name__}.dataloader"), name)
    except ImportError as error:
        raise ExtraMissing(
            f"{name} needs torch and tensordict: pip install 'relax-transferqueue[torch]'"
        ) from error
