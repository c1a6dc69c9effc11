"""The accounts are held against the journal: what does not add up is a fault."""

import json
from pathlib import Path

import numpy as np
import transferqueue as tq
from relax import schema
from relax.distributed.bus import Endpoint
from relax.orchestration.accounting import UNTRAINED, settle


def journal(file: Path, *steps: tuple[int, list[int]]) -> Path:
    lines = []
    for step, ids in steps:
        lines += [{"step": step, "segment": 0, "ids": ids}, {"step": step, "segment": 0, "done": True}]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def test_accounts_are_exact_or_say_what_is_wrong(tmp_path: Path) -> None:
    with tq.serve() as server:
        queue = tq.connect(server.address)
        part = queue.partition(schema.PARTITION, tasks={schema.TASK_ACTOR: ["x"]})
        ids = [int(i) for i in part.put({"x": np.arange(6)})]
        part.fetch(schema.TASK_ACTOR, 3).ack()
        part.drop(ids[3:4], reason="broken")
        bus = Endpoint(server.address)
        exact = settle(bus, journal(tmp_path / "j", (0, ids[:2]), (1, ids[2:3])), 0)
        assert exact.faults == []
        assert (exact.put, exact.trained) == (6, 3)
        assert exact.dropped == {"broken": 1, UNTRAINED: 2}
        twice = settle(bus, journal(tmp_path / "j", (0, ids[:3]), (1, ids[:1])), 0)
        assert "trained more than once" in twice.faults[0]
        lost = settle(bus, journal(tmp_path / "j", (0, ids[:2])), 0)
        assert "acknowledged but never trained" in lost.faults[0]
        unacked = settle(bus, journal(tmp_path / "j", (0, ids[:4])), 0)
        assert "trained but not acknowledged" in unacked.faults[0]
        queue.close()


def test_a_run_that_ended_before_its_first_sample_has_none(tmp_path: Path) -> None:
    with tq.serve() as server:
        assert settle(Endpoint(server.address), tmp_path / "none", 0).put == 0
