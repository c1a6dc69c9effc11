"""`TransferQueueClient`: payload goes to the store, metadata to the catalog. May be used from any thread.

Every call has an awaitable twin, ``async_`` and its name, which runs it in a thread.
"""

import asyncio
import contextlib
import functools
import os
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Concatenate

import numpy as np

from ... import Partition, UnknownSample, connect
from ...errors import Timeout
from . import messages as m
from .batch_metadata import BatchMeta, batch_of
from .config import Config, addressed
from .errors import InvalidRequest, RequestFailed, StorageKeyNotFoundError
from .link import Link
from .packing import pack, unpack
from .rows import Encoded, Rows, encode, read
from .tensors import batch, tensordict, torch_module

STORE_PARTITION = "transfer_queue"
FREED = "cleared"  # a task that needs this field is how rows end, without leaving a trace of each
_PATIENCE = 5.0
_PUT_SECONDS = 120.0


def _twin[**P, R](
    call: Callable[Concatenate["TransferQueueClient", P], R],
) -> Callable[Concatenate["TransferQueueClient", P], Coroutine[Any, Any, R]]:
    @functools.wraps(call)
    async def twin(self: "TransferQueueClient", /, *args: P.args, **kwargs: P.kwargs) -> R:
        return await self.in_thread(functools.partial(call, self, *args, **kwargs))

    return twin


class TransferQueueClient:
    """A connection to a store and its catalog.

    Args:
        client_id: a name, for whoever reads the program.
        controller_info: the address of the catalog, or the ``controller.zmq_info`` of a configuration that
            `init` returned, which has the token too.

    Attributes:
        config: of the store, as `init` returned it.
    """

    def __init__(self, client_id: str, controller_info: "str | Mapping[str, Any]") -> None:
        self.client_id = client_id
        address, token = addressed(controller_info)
        self._link = Link(address, token)
        try:
            welcome = self._link.welcome
            self._queue = connect(welcome.store, welcome.token)
            self._store: Partition = self._queue.partition(STORE_PARTITION)
        except BaseException:
            self._link.close()
            raise
        self.config = Config.of(unpack(welcome.config))
        self.config.controller.zmq_info = Config(address=address, token=token)
        self._polling = bool(self.config.controller.polling_mode)
        self._settles = self.config.controller.settle == "next"
        self._taken: dict[tuple[str, str], list[int]] = {}
        self._lock = threading.Lock()
        self._threads: ThreadPoolExecutor | None = None

    async def in_thread[R](self, call: Callable[[], R]) -> R:
        """Awaits a blocking call in one of this client's threads."""
        with self._lock:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(64, thread_name_prefix=f"transfer_queue-{self.client_id}")
            threads = self._threads
        return await asyncio.get_running_loop().run_in_executor(threads, call)

    def close(self) -> None:
        """Disconnects: what this client has taken counts as consumed. Idempotent."""
        with self._lock:
            threads, self._threads = self._threads, None
        self._link.close()
        self._queue.close()
        if threads is not None:
            threads.shutdown(wait=False, cancel_futures=True)

    # -- samples ---------------------------------------------------------------------------------------------

    def get_meta(
        self,
        data_fields: Sequence[str] | None = None,
        batch_size: int | None = None,
        partition_id: str = "",
        mode: str = "fetch",
        task_name: str | None = None,
        sampling_config: Mapping[str, Any] | None = None,
    ) -> BatchMeta:
        """Metadata of samples.

        Args:
            data_fields: which fields they must have, and the batch is about.
            batch_size: samples wanted.
            mode: "fetch" takes ready samples for a task, each once; "force_fetch" describes all samples of
                the partition, ready or not (`batch_size` does not matter, `data_fields` may be None for
                all); "insert" makes new ones, to be put with the batch.
            task_name: whose samples are taken.
            sampling_config: arguments for the sampler.

        Returns:
            The batch. An empty one if there are not enough samples and the store was started with
            ``polling_mode``.

        Raises:
            RequestFailed: not enough samples became ready in ``TQ_CONTROLLER_GET_METADATA_TIMEOUT`` seconds
                (default 5), or the sampler raised.
        """
        fields = None if data_fields is None else list(data_fields)
        if mode == "force_fetch":
            return batch_of(self._link.call(m.Scan(partition_id, fields), m.Places))
        if fields is None or batch_size is None:
            raise InvalidRequest(f"mode {mode!r} needs data_fields and batch_size")
        if mode == "insert":
            return batch_of(self._link.call(m.Allocate(partition_id, batch_size, fields), m.Places))
        if mode != "fetch":
            raise InvalidRequest(f'mode is {mode!r}; it must be "fetch", "force_fetch" or "insert"')
        if task_name is None:
            raise InvalidRequest("mode 'fetch' needs the task_name that the samples are taken for")
        wait = float(os.environ.get("TQ_CONTROLLER_GET_METADATA_TIMEOUT", _PATIENCE))
        patience = 0.0 if self._polling else wait
        places = self._take(partition_id, fields, task_name, batch_size, sampling_config, patience)
        if places.indexes:
            return batch_of(places)
        if self._polling:
            return BatchMeta.empty()
        raise RequestFailed(
            f"fewer than {batch_size} samples of partition {partition_id!r} became ready with {fields} for "
            f"task {task_name!r} in {wait:g} s; put more, ask for fewer, or start the store with polling_mode"
        )

    def _take(
        self,
        partition: str,
        fields: list[str],
        task: str,
        count: int,
        config: Mapping[str, Any] | None,
        patience: float,
    ) -> m.Places:
        wanted = {"task_name": task, "partition_id": partition} | dict(config or {})
        with self._lock:
            done = self._taken.pop((partition, task), []) if self._settles else []
        request = m.Take(partition, fields, task, count, pack(wanted), patience, done)
        places = self._link.call(request, m.Places, patience)
        if places.ticket and self._settles:
            with self._lock:
                self._taken.setdefault((partition, task), []).append(places.ticket)
        return places

    def ack(self, metadata: BatchMeta, task_name: str) -> None:
        """Says that a task is through with samples, which `get_meta` gave to this client: they do not return
        if it dies. It is needed only with ``controller.settle: "ack"``; by default the next `get_meta` for
        the task says so.
        """
        for part in metadata.chunk_by_partition():
            request = m.Ack(part.partition_ids[0], task_name, part.global_indexes)
            self._link.call(request, type(None))

    def put(
        self,
        data: Any,
        metadata: BatchMeta | None = None,
        partition_id: str | None = None,
        data_parser: Callable[[Any], Any] | None = None,
    ) -> BatchMeta:
        """Writes fields: of new samples of a partition, or of those of a batch.

        Args:
            data: a TensorDict with one row a sample, or a mapping of name to tensor, array or list.
            metadata: the samples, whose tags are stored too; its fields and readiness are updated in place.
            partition_id: where the new samples go.
            data_parser: changes the values in place before they are stored; runs in this process.

        Returns:
            `metadata`, or that of the new samples.

        Raises:
            InvalidRequest: rows, dtypes or arguments do not fit.
            StorageKeyNotFoundError: samples of `metadata` are cleared.
            Full: the store's limits left no room.
        """
        if metadata is not None and not metadata.size:
            raise InvalidRequest("the batch is empty; there is nothing to put")
        encoded = encode(data, data_parser)
        if metadata is not None:
            if encoded.rows != metadata.size:
                raise InvalidRequest(f"{encoded.rows} rows of data for {metadata.size} samples")
            self.write(metadata.global_indexes, metadata.partition_ids, encoded, metadata.custom_meta)
            return metadata._add(encoded.writes, encoded.rows)
        if partition_id is None:
            raise InvalidRequest("without metadata, partition_id must say where the samples go")
        with self._rows(encoded.columns) as rows:
            made = batch_of(self._link.call(m.Insert(partition_id, rows, encoded.writes), m.Places))
        return made

    @contextlib.contextmanager
    def _rows(self, columns: dict[str, Any]) -> Iterator[list[int]]:
        """New rows of the store; given up if the block raises."""
        rows = self._store.put(columns, timeout=_PUT_SECONDS).tolist()
        try:
            yield rows
        except BaseException:
            self.free(rows)
            raise

    def write(
        self,
        indexes: list[int],
        partitions: str | list[str],
        encoded: Encoded,
        metas: Sequence[Mapping[str, Any]],
    ) -> None:
        """Writes fields of samples, and merges their tags."""
        tags = pack(list(metas))
        known = self._link.call(m.Locate(indexes, partitions, None), m.Places).rows
        while True:
            with self._written(encoded, known) as rows:
                there = self._link.call(m.Commit(indexes, partitions, rows, encoded.writes, tags), list[int])
            if there == rows:
                return
            known = self._beaten(known, rows, there)

    def write_keys(
        self,
        partition: str,
        keys: list[str],
        encoded: Encoded | None,
        metas: Sequence[Mapping[str, Any]] | None,
    ) -> m.Places:
        """Writes fields, tags or both of the samples of keys; makes those that are missing."""
        tags = None if metas is None else pack(list(metas))
        if encoded is None:
            none = [0] * len(keys)
            return self._link.call(m.CommitKeys(partition, keys, none, none, [], tags), m.Places)
        known = self._link.call(m.RowsOf(partition, keys), list[int])
        while True:
            with self._written(encoded, known) as rows:
                request = m.CommitKeys(partition, keys, known, rows, encoded.writes, tags)
                places = self._link.call(request, m.Places)
            if places.indexes:
                return places
            known = self._beaten(known, rows, places.rows)

    @contextlib.contextmanager
    def _written(self, encoded: Encoded, known: list[int]) -> Iterator[list[int]]:
        """Payload in the store: over the rows that are known, and in new ones where there are none (0)."""
        new = [at for at, row in enumerate(known) if not row]
        old = [at for at, row in enumerate(known) if row]
        rows = list(known)
        with contextlib.ExitStack() as stack:
            if old:
                columns = encoded.only(old) if new else encoded.columns
                try:
                    self._store.update([known[at] for at in old], columns, timeout=_PUT_SECONDS)
                except UnknownSample as error:
                    raise StorageKeyNotFoundError("samples were cleared while they were written") from error
            if new:
                columns = encoded.only(new) if old else encoded.columns
                made = stack.enter_context(self._rows(columns))
                for at, row in zip(new, made, strict=True):
                    rows[at] = row
            yield rows

    def _beaten(self, known: list[int], rows: list[int], there: list[int]) -> list[int]:
        """Another client gave some samples their first payload meanwhile: ours goes there too, anew."""
        self.free([row for old, row in zip(known, rows, strict=True) if not old])
        return [old or (now if now != row else 0) for old, row, now in zip(known, rows, there, strict=True)]

    def get_data(self, metadata: BatchMeta) -> Any:
        """The fields of a batch as a TensorDict, in the order of its samples.

        Raises:
            StorageKeyNotFoundError: some of its samples are cleared.
            FieldsNotReady: some of them do not have a field.
            ExtraMissing: torch or tensordict is not installed.
        """
        if not metadata.size or not metadata.field_schema:
            return tensordict().TensorDict({}, batch_size=0)
        names = list(metadata.field_schema)
        request = m.Locate(metadata.global_indexes, metadata.partition_ids, names)
        return self.read(self._link.call(request, m.Places))

    def read(self, places: m.Places) -> Any:
        """The fields that an answer of the catalog describes, as a TensorDict."""
        return batch(self.read_rows(places), len(places.rows))

    def read_rows(self, places: m.Places) -> dict[str, Rows]:
        """The fields that an answer of the catalog describes."""
        try:
            return read(places, self._store.get)
        except UnknownSample as error:
            raise _stale(places.indexes) from error

    # -- clearing --------------------------------------------------------------------------------------------

    def clear_samples(self, metadata: BatchMeta) -> None:
        """Removes the samples of a batch; those that are gone already do not matter."""
        request = m.Clear(metadata.global_indexes, metadata.partition_ids)
        self.free(self._link.call(request, list[int]))

    def clear_partition(self, partition_id: str) -> None:
        """Removes a partition and all of its samples, if it is there."""
        self.free(self._link.call(m.ClearPartition(partition_id), list[int]))

    def free(self, rows: list[int]) -> None:
        """Has the store end rows that the catalog does not know any more."""
        if not rows:
            return
        self._store.update(rows, {FREED: np.zeros(len(rows), np.uint8)})
        with contextlib.suppress(Timeout):  # no more: another client ends rows too, perhaps these
            while True:
                self._store.fetch(FREED, len(rows), partial=True, timeout=0.0, fields=[FREED]).ack()

    # -- what is there ---------------------------------------------------------------------------------------

    def set_custom_meta(self, metadata: BatchMeta) -> None:
        """Stores the tags of a batch: whoever gets metadata of its samples from now on sees them."""
        tags = pack(metadata.custom_meta)
        self._link.call(m.SetMeta(metadata.global_indexes, metadata.partition_ids, tags), type(None))

    def get_consumption_status(self, task_name: str, partition_id: str) -> tuple[Any, Any]:
        """Tensors: global indexes int64 ``[samples]``, and int8 ``[samples]``, 1 for what the task has
        consumed. Two None for a partition that does not exist.
        """
        return _tensors(self._link.call(m.Consumption(partition_id, task_name), m.Status), None)

    def get_production_status(self, data_fields: Sequence[str], partition_id: str) -> tuple[Any, Any]:
        """Tensors: global indexes int64 ``[samples]``, and int8 ``[samples, fields]``, 1 for what is written.
        Two None if the partition or a field does not exist.
        """
        status = self._link.call(m.Production(partition_id, list(data_fields)), m.Status)
        return _tensors(status, len(data_fields))

    def check_consumption_status(self, task_name: str, partition_id: str) -> bool:
        """Whether there are samples, and the task has consumed all of them."""
        status = self._link.call(m.Consumption(partition_id, task_name), m.Status)
        return bool(status.indexes) and all(status.states)

    def check_production_status(self, data_fields: Sequence[str], partition_id: str) -> bool:
        """Whether all samples have all of these fields."""
        status = self._link.call(m.Production(partition_id, list(data_fields)), m.Status)
        return status.indexes is not None and all(status.states)

    def reset_consumption(self, partition_id: str, task_name: str | None = None) -> bool:
        """Makes the samples of a partition unconsumed, for one task or for all. False if it is not there."""
        return self._link.call(m.Reset(partition_id, task_name), bool)

    def get_partition_list(self) -> list[str]:
        """Names of all partitions."""
        return self._link.call(m.Names(), list[str])

    # -- keys ------------------------------------------------------------------------------------------------

    def kv_retrieve_meta(
        self, keys: Sequence[str] | str, partition_id: str, create: bool = False
    ) -> BatchMeta:
        """Metadata of the samples under these keys, with the fields that all of them have.

        Args:
            create: make the samples that are missing; otherwise they are left out.
        """
        return batch_of(self.retrieve(keys, partition_id, create=create))

    def retrieve(
        self,
        keys: Sequence[str] | str,
        partition: str,
        create: bool = False,
        strict: bool = False,
        fields: Sequence[str] | None = None,
    ) -> m.Places:
        """Where the samples of keys lie; see `messages.Retrieve`."""
        wanted = [keys] if isinstance(keys, str) else list(keys)
        if not wanted:
            raise InvalidRequest("keys is empty; name at least one")
        wrong = [key for key in wanted if not isinstance(key, str)]
        if wrong:
            raise TypeError(f"keys are str, got {wrong[0]!r} ({type(wrong[0]).__name__})")
        names = None if fields is None else list(fields)
        return self._link.call(m.Retrieve(partition, wanted, create, strict, names), m.Places)

    def kv_retrieve_keys(self, global_indexes: Sequence[int] | int, partition_id: str) -> list[str]:
        """The keys of samples. KeysNotFound if one was put without a key."""
        indexes = [global_indexes] if isinstance(global_indexes, int) else list(global_indexes)
        return self._link.call(m.KeysOf(partition_id, indexes), list[str])

    def kv_list(self, partition_id: str | None = None) -> dict[str, dict[str, Any]]:
        """Partition -> key -> tags, of one partition (empty if it is not there) or of all."""
        return unpack(self._link.call(m.ListKeys(partition_id), bytes))

    # -- for the streaming dataset and checkpoints -----------------------------------------------------------

    def changes(self, partition_id: str, seen: int = -1, patience: float = 0.0) -> int:
        """How often a partition has changed; waits up to `patience` seconds for another number than
        `seen`.
        """
        return self._link.call(m.News(partition_id, seen, patience), int, patience)

    def drained(self, partition_id: str, task_name: str, sampling_config: Mapping[str, Any]) -> bool:
        """Whether a task has consumed all of a partition, and no batch is kept for this rank and index."""
        request = m.Drained(partition_id, task_name, pack(dict(sampling_config)))
        return self._link.call(request, bool)

    def in_turn(self, partition_id: str, task_name: str, sampling_config: Mapping[str, Any]) -> bool:
        """Whether a rank's batch may be taken without leaving out the one before."""
        request = m.InTurn(partition_id, task_name, pack(dict(sampling_config)))
        return self._link.call(request, bool)

    def dump_catalog(self) -> bytes:
        """All metadata, packed."""
        return self._link.call(m.Dump(), bytes)

    def load_catalog(self, state: bytes, rows: dict[int, int]) -> None:
        """Replaces all metadata by what `dump_catalog` gave; ``rows[index]`` is where a sample lies now."""
        self.free(self._link.call(m.Load(state, rows), list[int]))

    def fetch_rows(self, rows: Sequence[int], names: Sequence[str]) -> dict[str, Any]:
        """Columns of the store."""
        return dict(self._store.get(rows, names))

    def put_rows(self, columns: dict[str, Any]) -> list[int]:
        """New rows of the store."""
        return self._store.put(columns, timeout=_PUT_SECONDS).tolist()

    async_get_meta = _twin(get_meta)
    async_ack = _twin(ack)
    async_put = _twin(put)
    async_get_data = _twin(get_data)
    async_clear_samples = _twin(clear_samples)
    async_clear_partition = _twin(clear_partition)
    async_set_custom_meta = _twin(set_custom_meta)
    async_get_consumption_status = _twin(get_consumption_status)
    async_get_production_status = _twin(get_production_status)
    async_check_consumption_status = _twin(check_consumption_status)
    async_check_production_status = _twin(check_production_status)
    async_reset_consumption = _twin(reset_consumption)
    async_get_partition_list = _twin(get_partition_list)
    async_kv_retrieve_meta = _twin(kv_retrieve_meta)
    async_kv_retrieve_keys = _twin(kv_retrieve_keys)
    async_kv_list = _twin(kv_list)


def _stale(indexes: list[int]) -> StorageKeyNotFoundError:
    return StorageKeyNotFoundError(
        f"samples were cleared while they were read or written (of global indexes {indexes[:8]}); get the "
        "metadata anew"
    )


def _tensors(status: m.Status, fields: int | None) -> tuple[Any, Any]:
    if status.indexes is None:
        return None, None
    torch = torch_module()
    shape = (len(status.indexes),) if fields is None else (len(status.indexes), fields)
    states = np.frombuffer(status.states, np.int8).reshape(shape).copy()
    return torch.tensor(status.indexes, dtype=torch.long), torch.from_numpy(states)
