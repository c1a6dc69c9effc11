"""`ray.put` and `ray.get` of a batch, in a Ray of its own.

    python ray_peer.py '{"folder": SHORT_PATH, "samples": N}'

`get` is zero-copy: read-only views of the object store; `copy` is what a writable copy of them costs on top.
"""

import logging
import os
import time

os.environ.pop("RAY_ADDRESS", None)

import ray
from answering import answer, work
from batches import rows


def main() -> None:
    words = work()
    batch = rows(words["samples"], images=True).fields()
    ray.init(
        num_cpus=1,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=1 << 30,
        _temp_dir=words["folder"],
    )

    def bulk() -> dict[str, float]:
        begun = time.perf_counter()
        reference = ray.put(batch)
        put = time.perf_counter()
        read = ray.get(reference)
        got = time.perf_counter()
        copies = {
            name: column.copy()
            if hasattr(column, "copy") and not isinstance(column, list)
            else [row.copy() for row in column]
            for name, column in read.items()
        }
        copied = time.perf_counter()
        if copies.keys() != batch.keys():
            raise RuntimeError("Ray gave back other fields than it was given")
        return {"put": put - begun, "get": got - put, "copy": copied - got}

    answer({"bulk": bulk})
    ray.shutdown()


if __name__ == "__main__":
    main()
