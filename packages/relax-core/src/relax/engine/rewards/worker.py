"""The child process of a `WorkerPool`: answers one request at a time until its input ends.

Run as `python -m relax.engine.rewards.worker MODULE:FUNCTION MEMORY_BYTES`.
"""

import importlib
import os
import resource
import signal
import sys

from relax.engine.rewards.frames import HEADER, READY, decode, encode


def main(target: str, memory_bytes: int) -> None:
    """Serve FUNCTION(request) over stdin and stdout. An exception ends the process, with its traceback."""
    requests = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    # What a library prints must not end up between the frames.
    os.dup2(2, 1)
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    module, _, attribute = target.partition(":")
    function = getattr(importlib.import_module(module), attribute)

    def send(message: object) -> None:
        answers.write(encode(message))
        answers.flush()

    send(READY)
    while header := requests.read(HEADER.size):
        (length,) = HEADER.unpack(header)
        timeout, request = decode(requests.read(length))
        # The parent kills a late child; the alarm does where the parent itself has died.
        signal.setitimer(signal.ITIMER_REAL, timeout + 1.0)
        answer = function(request)
        signal.setitimer(signal.ITIMER_REAL, 0)
        send(answer)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
