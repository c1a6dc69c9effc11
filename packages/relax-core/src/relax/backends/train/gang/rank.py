"""A rank that is not the leader: `python -m relax.backends.train.gang.rank ADDRESS RANK`, token on stdin.

It connects to the leader, is told its job, joins the groups, builds its rank backend and answers verbs until
the leader lets it go.
"""

import os
import signal
import sys
import traceback
from typing import Any

from relax.backends.train.gang.processes import end_with_parent
from relax.backends.train.gang.tether import EXIT_GIVEN_UP, Tether

TRACE = 1 << 16
"""Characters of a traceback that are sent."""


def main(arguments: list[str]) -> int:
    address, rank = arguments
    # Ctrl-C reaches every process of a terminal; it is the leader's to make a tidy end of it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    token = _line(0)
    end_with_parent()
    tether = Tether(address, token, int(rank))
    doing = "its start"
    try:
        job: Any = tether.next(silence=60.0)
        # Torch is imported once the tether holds: it takes seconds.
        from relax.backends.train.gang.control import Control, join_store
        from relax.backends.train.gang.messages import Call, Here, Job, Ready
        from relax.backends.train.gang.verbs import Member, build

        if not isinstance(job, Job):
            return 0  # the leader ended before it began
        tether.say(Here())
        store = join_store(*job.store, job.timeout)
        control = Control(
            store, job.rank, job.world_size, device=job.device, timeout=job.timeout, host=tether.host
        )
        backend, loss = build(job)
        at = backend.coordinates
        tether.say(Ready(at.data_rank, at.data_size, at.speaks))
        member = Member(backend, loss)
        while isinstance(tether.next(silence=job.timeout), Call):
            doing = "taking a verb"
            plain, part = control.take()
            doing = plain["verb"]
            control.answer(member.do(plain, part))
            doing = "waiting"
        member.close()
        control.close()
        tether.close()
        return 0
    except Exception as error:  # noqa: BLE001 - told to the leader, who raises it; this process ends
        trace = traceback.format_exc()
        print(trace, file=sys.stderr, flush=True)
        from relax.backends.train.gang.failures import is_consequence
        from relax.backends.train.gang.messages import Raised

        told = f"{type(error).__name__}: {error}"
        tether.say(Raised(doing, told, trace[-TRACE:], is_consequence(error)))
        # Not by returning: process groups that hang would keep the interpreter from ending.
        os._exit(EXIT_GIVEN_UP)


def _line(descriptor: int) -> str:
    """One line of a pipe, and not a byte more."""
    found = b""
    while not found.endswith(b"\n") and (byte := os.read(descriptor, 1)):
        found += byte
    return found.decode().strip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
