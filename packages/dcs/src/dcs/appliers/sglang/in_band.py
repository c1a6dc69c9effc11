"""The weights inside the HTTP calls: `update_weights_from_tensor`, in flattened buckets.

What SGLang expects there is a pickle (it reads it with an unpickler of its own that allows tensors and
little else). This module is the only place in dcs that makes one; nothing in dcs ever reads one. Buckets of
CPU tensors travel as bytes, so the server may be on another machine. Buckets on a GPU travel as CUDA-IPC
handles, so the server has to share this GPU or reach it as a peer on the same machine.
"""

import base64
import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import torch
from torch.multiprocessing import reductions

from dcs.appliers.buckets import Bucket, cut, fill
from dcs.appliers.http import EngineServer

_DEVICE_INDEX = 6  # of the arguments that torch rebuilds a CUDA tensor from


class InBand:
    """See the module; `ranks` is the server's tensor-parallel size."""

    in_session = True

    def __init__(self, server: EngineServer, ranks: int, bucket_bytes: int) -> None:
        self._server = server
        self._ranks = ranks
        self._bucket_bytes = bucket_bytes

    def prepare(self, version: int, tensors: Mapping[str, torch.Tensor]) -> Callable[[], None]:
        buckets = cut(tensors, self._bucket_bytes)
        first = self._encode(buckets[0], tensors)

        def send() -> None:
            # The next bucket is encoded while the server loads this one.
            with ThreadPoolExecutor(1, thread_name_prefix="dcs-sglang") as ahead:
                encoded = first
                for number, _ in enumerate(buckets, start=1):
                    last = number == len(buckets)
                    following = None if last else ahead.submit(self._encode, buckets[number], tensors)
                    self._post(encoded[1], version if last else None)
                    if following is not None:
                        encoded = following.result()

        return send

    def close(self) -> None:
        """Nothing to give back."""

    def _encode(
        self, bucket: Bucket, tensors: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, Sequence[bytes]]:
        """The flat bucket, to be kept until the server has loaded it, and each rank's payload in base64."""
        device = tensors[bucket.names[0]].device
        flat = torch.empty(bucket.nbytes, dtype=torch.uint8, device=device)
        fill(flat, bucket.names, tensors)
        metadata: list[SimpleNamespace] = []
        end = 0
        for name in bucket.names:
            tensor = tensors[name]
            start, end = end, end + tensor.nbytes
            metadata.append(
                SimpleNamespace(
                    name=name,
                    shape=tuple(tensor.shape),
                    dtype=tensor.dtype,
                    start_idx=start,
                    end_idx=end,
                    numel=tensor.nbytes,
                )
            )
        content = {"flattened_tensor": flat, "metadata": metadata}
        if flat.is_cuda:  # each rank frees a handle of its own
            return flat, [base64.b64encode(_pickled(content)) for _ in range(self._ranks)]
        return flat, [base64.b64encode(_pickled(content))] * self._ranks

    def _post(self, payloads: Sequence[bytes], version: int | None) -> None:
        parts = [b'{"serialized_named_tensors":["', payloads[0]]
        for payload in payloads[1:]:
            parts += [b'","', payload]
        named = b"null" if version is None else b'"%d"' % version
        parts.append(b'"],"load_format":"flattened_bucket","flush_cache":false,"weight_version":%b}' % named)
        self._server.post_parts("/update_weights_from_tensor", parts)


class _Pickler(pickle.Pickler):
    """Plain pickle, but a CUDA tensor as its handle and the identity of its GPU.

    The server may number the GPUs otherwise (CUDA_VISIBLE_DEVICES), so SGLang takes a GPU's uuid in place
    of the index.
    """

    def reducer_override(self, obj: Any) -> Any:
        if not (isinstance(obj, torch.Tensor) and obj.is_cuda):
            return NotImplemented
        rebuild, arguments = reductions.reduce_tensor(obj)
        uuid = str(torch.cuda.get_device_properties(obj.device).uuid)
        return rebuild, (*arguments[:_DEVICE_INDEX], uuid, *arguments[_DEVICE_INDEX + 1 :])


def _pickled(content: object) -> bytes:
    out = io.BytesIO()
    _Pickler(out, protocol=pickle.HIGHEST_PROTOCOL).dump(content)
    return out.getvalue()
