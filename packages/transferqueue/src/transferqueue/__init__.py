"""A field-level sample store for post-training.

Producers put and update columns of samples; consumers stream the samples whose columns are ready, under
leases. A store is a controller (metadata, scheduling) and storage units (payload), each a process; `serve`
starts one, `connect` or `connect_async` gives a client.
"""

from . import samplers
from .client.aio import AsyncBatch, AsyncClient, AsyncPartition, connect_async
from .client.blocking import Batch, Client, Partition, connect
from .client.calls import Ledger, Ranks
from .client.loader import AsyncStreamingDataLoader, StreamingDataLoader
from .errors import (
    Closed,
    ControllerLost,
    Corrupt,
    FieldNotReady,
    Full,
    GroupMismatch,
    InvalidArgument,
    Malformed,
    ProtocolMismatch,
    QueueError,
    SchemaMismatch,
    StaleLease,
    StartFailed,
    StorageLost,
    Timeout,
    TooLarge,
    Unauthorized,
    UnknownName,
    UnknownSample,
)
from .ids import IdSet
from .introspection.statistics import StoreStats
from .scheduling.samples import Candidate
from .server.launch import Server, serve
from .values.columns import Column, FieldSpec
from .values.encode import Varying
from .values.restoring import restore, to_tensordict

__all__ = [
    "AsyncBatch",
    "AsyncClient",
    "AsyncPartition",
    "AsyncStreamingDataLoader",
    "Batch",
    "Candidate",
    "Client",
    "Closed",
    "Column",
    "ControllerLost",
    "Corrupt",
    "FieldNotReady",
    "FieldSpec",
    "Full",
    "GroupMismatch",
    "IdSet",
    "InvalidArgument",
    "Ledger",
    "Malformed",
    "Partition",
    "ProtocolMismatch",
    "QueueError",
    "Ranks",
    "SchemaMismatch",
    "Server",
    "StaleLease",
    "StartFailed",
    "StorageLost",
    "StoreStats",
    "StreamingDataLoader",
    "Timeout",
    "TooLarge",
    "Unauthorized",
    "UnknownName",
    "UnknownSample",
    "Varying",
    "connect",
    "connect_async",
    "restore",
    "samplers",
    "serve",
    "to_tensordict",
]
