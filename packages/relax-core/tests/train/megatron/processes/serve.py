"""One rank process of the tests: runs cases from stdin, a line of JSON each, and answers on stdout."""

import contextlib
import gc
import json
import os
import sys
import traceback
from datetime import timedelta


def main(rank: int, world: int, store: str) -> None:
    # What libraries print must not be taken for answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=120),
    )
    import rank_cases

    for line in sys.stdin:
        try:
            answer = {"result": json.loads(rank_cases.run(line))}
        except BaseException as error:  # noqa: BLE001  # told to the test, which fails with it
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        gc.collect()  # a rank's groups go with the last of its modules; each polls from a thread
    with contextlib.suppress(RuntimeError):  # the other rank may be gone already
        distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
