"""The key-value calls: samples by a user's own keys, with tags.

Each has an awaitable twin, ``async_`` and its name.
"""

import functools
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from .batch_metadata import batch_of
from .errors import FieldsNotReady, InvalidRequest
from .kv_metadata import KVBatchMeta
from .rows import encode, is_nested
from .session import get_client


def _twin[**P, R](call: Callable[P, R]) -> Callable[P, Coroutine[Any, Any, R]]:
    @functools.wraps(call)
    async def twin(*args: P.args, **kwargs: P.kwargs) -> R:
        return await get_client().in_thread(functools.partial(call, *args, **kwargs))

    return twin


def kv_put(
    key: str,
    partition_id: str,
    fields: Any = None,
    tag: Mapping[str, Any] | None = None,
    data_parser: Callable[[Any], Any] | None = None,
) -> KVBatchMeta:
    """Writes fields of one sample, its tag, or both.

    Args:
        key: the sample's; made if it is not there.
        fields: a TensorDict of batch size 1, or a dict with the sample's own values, without a batch
            dimension.
        tag: merged into what is stored.
        data_parser: changes the values in place before they are stored; runs in this process.

    Returns:
        The key with its whole tag, and the fields that it has now.

    Raises:
        InvalidRequest: neither `fields` nor `tag`, or values that do not fit.
    """
    if isinstance(fields, dict):
        for name, value in fields.items():
            if is_nested(value):
                raise InvalidRequest(f"field {name!r} is a nested tensor, which is a batch; use kv_batch_put")
        fields = {name: value[None] if hasattr(value, "shape") else [value] for name, value in fields.items()}
    elif fields is not None and not hasattr(fields, "batch_size"):
        raise InvalidRequest(f"fields is a {type(fields).__name__}; give a dict or a TensorDict")
    return kv_batch_put([key], partition_id, fields, None if tag is None else [tag], data_parser)


def kv_batch_put(
    keys: Sequence[str],
    partition_id: str,
    fields: Any = None,
    tags: Sequence[Mapping[str, Any]] | None = None,
    data_parser: Callable[[Any], Any] | None = None,
) -> KVBatchMeta:
    """Writes fields of samples, their tags, or both.

    Args:
        keys: one a sample, each once; samples that are not there are made.
        fields: a TensorDict with one row a key, or a mapping of name to tensor, array or list.
        tags: one dict a key, merged into what is stored.
        data_parser: as for `kv_put`.

    Returns:
        The keys with their whole tags, and the fields that all of them have now.

    Raises:
        InvalidRequest: neither `fields` nor `tags`, lengths that differ, or values that do not fit.
    """
    if fields is None and tags is None:
        raise InvalidRequest("there is nothing to put; give fields, tags or both")
    keys = list(keys)
    if len(set(keys)) != len(keys):
        raise InvalidRequest(f"keys names something twice: {keys}")
    if tags is not None and len(tags) != len(keys):
        raise InvalidRequest(f"{len(tags)} tags do not match {len(keys)} keys")
    encoded = None if fields is None else encode(fields, data_parser)
    if encoded is not None and encoded.rows != len(keys):
        raise InvalidRequest(f"fields has {encoded.rows} rows, which does not match {len(keys)} keys")
    if not keys:
        raise InvalidRequest("keys is empty; name at least one")
    meta = batch_of(get_client().write_keys(partition_id, keys, encoded, tags))
    return KVBatchMeta(keys, meta.custom_meta, partition_id, meta.field_names, {})


def kv_batch_get(
    keys: Sequence[str] | str, partition_id: str, select_fields: Sequence[str] | str | None = None
) -> Any:
    """The fields of samples as a TensorDict, one row a key.

    Args:
        keys: one or more.
        select_fields: one or more; None: those that all of the samples have.

    Raises:
        KeysNotFound: a sample or the partition is not there.
        FieldsNotReady: a sample does not have a field, or they have none in common.
        ExtraMissing: torch or tensordict is not installed.
    """
    fields = [select_fields] if isinstance(select_fields, str) else select_fields
    client = get_client()
    places = client.retrieve(keys, partition_id, strict=True, fields=fields)
    missing = set(fields or ()) - {write.name for write in places.fields}
    if missing or not places.fields:
        raise FieldsNotReady(
            f"fields {sorted(missing)} are not ready in any of the {len(places.rows)} samples asked for"
            if missing
            else f"the {len(places.rows)} samples asked for have no field in common",
            fields=sorted(missing),
        )
    return client.read(places)


def kv_batch_get_by_meta(meta: KVBatchMeta, select_fields: Sequence[str] | str | None = None) -> Any:
    """The fields of the samples of a batch: ``meta.fields``, or some of them. See `kv_batch_get`.

    Raises:
        InvalidRequest: the batch names no partition, or does not have a field of `select_fields`.
    """
    if meta.partition_id is None:
        raise InvalidRequest("the batch names no partition_id")
    if select_fields is None:
        return kv_batch_get(meta.keys, meta.partition_id, meta.fields)
    wanted = [select_fields] if isinstance(select_fields, str) else list(select_fields)
    missing = [name for name in wanted if name not in (meta.fields or ())]
    if missing:
        raise InvalidRequest(f"select_fields {missing} not found in the batch, which has {meta.fields}")
    return kv_batch_get(meta.keys, meta.partition_id, wanted)


def kv_list(partition_id: str | None = None) -> dict[str, dict[str, Any]]:
    """Partition -> key -> tag, of one partition (empty if it is not there) or of all."""
    return get_client().kv_list(partition_id)


def kv_clear(keys: Sequence[str] | str, partition_id: str) -> None:
    """Removes samples; keys that are not there do not matter."""
    client = get_client()
    client.clear_samples(batch_of(client.retrieve(keys, partition_id)))


async_kv_put = _twin(kv_put)
async_kv_batch_put = _twin(kv_batch_put)
async_kv_batch_get = _twin(kv_batch_get)
async_kv_batch_get_by_meta = _twin(kv_batch_get_by_meta)
async_kv_list = _twin(kv_list)
async_kv_clear = _twin(kv_clear)
