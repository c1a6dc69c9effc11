"""Both kinds of metadata, where the PyPI package has them."""

from .batch_metadata import BatchMeta
from .kv_metadata import KVBatchMeta

__all__ = ["BatchMeta", "KVBatchMeta"]
