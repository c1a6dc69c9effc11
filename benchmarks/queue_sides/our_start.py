"""From nothing to the first put: a store and its client in a process that has just begun.

    python our_start.py

Prints {"put": T}, the monotonic clock when the first put was acknowledged.
"""

import json
import time

import transferqueue


def main() -> None:
    with transferqueue.serve() as server, transferqueue.connect(server) as queue:
        queue.partition("train", tasks={"train": ["tokens"]}).put({"tokens": [1, 2, 3]})
        print(json.dumps({"put": time.monotonic()}), flush=True)


if __name__ == "__main__":
    main()
