"""Snapshots, taken while the store goes on, come back on another number of units."""

import errno
import fcntl
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transferqueue as tq
from transferqueue.cli import main
from transferqueue.controller.snapshot_folder import Target


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "snapshot"


@pytest.fixture
def filled(folder: Path) -> Iterator[tuple[dict[str, Any], list[int]]]:
    """A snapshot of all kinds of things on two units; what `get` gave of them."""
    with tq.serve(2) as server, tq.connect(server) as queue:
        part = queue.partition(
            "p", tasks={"read": ["text"], "train": ["text", "score"]}, max_samples=100, length_field="text"
        )
        image = np.arange(300_000, dtype=np.float32)
        texts = [np.arange(length, dtype=np.int32) for length in range(1, 9)]
        ids = part.put(
            {"text": texts, "name": [f"s{number}" for number in range(8)], "extra": [{"n": 1}, None] * 4},
            groups=["a"] * 4 + ["b"] * 4,
            version=[3] * 8,
            priority=list(range(8)),
            shared={"image": ([image], [0, 0, 0, 0, None, None, None, None])},
        ).tolist()
        part.update(ids[:6], {"score": np.arange(6, dtype=np.float16)})
        part.update(ids[:2], {"score": np.full(2, 7, np.float16)})  # written again
        part.fetch("read", 4).ack()
        part.fetch("train", 2, sampler=tq.samplers.InOrder()).ack()
        part.fetch("read", 2, lease_seconds=3600)
        part.drop([ids[7]], "too long")
        queue.partition("closed", tasks={"t": ["x"]}).close()
        queue.snapshot(folder)
        part.fetch("train", 2).ack()  # what comes later is not in it
        part.put({"text": texts})
        there = ids[2:7]
        yield part.get(there[2:], ["text", "name", "extra"]), ids


def same(left: Any, right: Any) -> bool:
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and left.shape == right.shape and bool((left == right).all())
    return left == right


@pytest.mark.parametrize("units", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_a_snapshot_comes_back_on_another_number_of_units(
    units: int, folder: Path, filled: tuple[dict[str, Any], list[int]]
) -> None:
    values, ids = filled
    with tq.serve(units, restore=folder) as server, tq.connect(server) as queue:
        part = queue.partition("p", max_samples=100)
        assert part.tasks == {"read": ("text",), "train": ("text", "score")}
        ledger = part.ledger("read")
        assert sorted(ledger.acked) == ids[:4]
        assert ledger.leased == ids[4:6]
        assert ledger.dropped == {ids[7]: "too long"}
        train = part.ledger("train")
        assert sorted(train.acked) == ids[:2]
        assert sorted(train.pending) == ids[2:7]
        got = part.get(ids[4:7], ["text", "name", "extra"])
        for name, column in values.items():
            assert all(same(one, other) for one, other in zip(column, got[name], strict=True))
        batch = part.fetch("train", 4, fields=["text", "score"])
        assert batch.ids.tolist() == ids[2:6]
        assert batch.groups == ["a", "a", "b", "b"]
        assert batch.versions.tolist() == [3] * 4
        assert batch.priorities.tolist() == [2, 3, 4, 5]
        assert np.asarray(batch["score"].values).tolist() == [2, 3, 4, 5]
        image = part.get(ids[2:4], ["image"])["image"]
        assert np.asarray(image[0]).tolist() == np.arange(300_000, dtype=np.float32).tolist()
        batch.ack()
        assert part.put({"text": [np.arange(3, dtype=np.int32)]})[0] > ids[-1]  # ids go on
        with pytest.raises(tq.SchemaMismatch):
            part.put({"text": [np.arange(3, dtype=np.int64)]})
        assert queue.partition("closed").closed


def test_bfloat16_comes_back(folder: Path) -> None:
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)
    tensor = torch.arange(12, dtype=torch.bfloat16).reshape(4, 3)
    with tq.serve(1) as server, tq.connect(server) as queue:
        ids = queue.partition("p", tasks={"t": ["x"]}).put({"x": tensor})
        queue.snapshot(folder)
    with tq.serve(2, restore=folder) as server, tq.connect(server, transport="zmq") as queue:
        column = queue.partition("p").get(ids)["x"]
        assert torch.equal(column.restore(), tensor)


def test_a_snapshot_is_one_moment_of_a_store_that_goes_on(folder: Path) -> None:
    with tq.serve(2) as server, tq.connect(server) as queue:
        part = queue.partition("p", tasks={"t": ["x"]})
        stop = threading.Event()

        def go_on() -> None:
            number = 0
            while not stop.is_set():
                part.put({"x": [np.full(50_000, number, np.int32)] * 2})
                if number >= 4:
                    part.fetch("t", 2).ack()
                number += 1

        worker = threading.Thread(target=go_on)
        worker.start()
        try:
            for _ in range(3):
                queue.snapshot(folder)
        finally:
            stop.set()
            worker.join(30)
    assert len(list(folder.glob("payload-*"))) <= 2  # those of earlier snapshots are gone
    with tq.serve(1, restore=folder) as server, tq.connect(server) as queue:
        part = queue.partition("p")
        ledger = part.ledger("t")
        samples = sorted([*ledger.pending, *ledger.leased])
        numbers = [int(np.asarray(row)[0]) for row in part.get(samples)["x"]]
        assert all((np.asarray(row) == np.asarray(row)[0]).all() for row in part.get(samples)["x"])
        assert numbers == sorted(numbers)
        assert all(numbers.count(number) == 2 for number in numbers)  # puts are there as a whole
        assert len(ledger.acked) + len(samples) == 2 * (numbers[-1] + 1)


def test_what_is_wrong_with_a_snapshot_is_named(folder: Path, tmp_path: Path) -> None:
    with tq.serve(1) as server, tq.connect(server) as queue:
        part = queue.partition("p", tasks={"t": ["x"]})
        part.put({"x": np.arange(1000)})
        (tmp_path / "other").mkdir()
        (tmp_path / "other" / "thesis.txt").write_text("the only copy")
        with pytest.raises(tq.InvalidArgument, match=r"thesis\.txt"):
            queue.snapshot(tmp_path / "other")
        queue.snapshot(folder)
        with pytest.raises(tq.InvalidArgument, match="no partition yet"):
            queue.restore(folder)
    with tq.serve(1) as server, tq.connect(server) as queue:
        with pytest.raises(tq.InvalidArgument, match="is no snapshot"):
            queue.restore(tmp_path / "nothing")
        [payload] = folder.glob("payload-*")
        whole = payload.read_bytes()
        payload.write_bytes(whole[:-100])
        with pytest.raises(tq.Corrupt, match=payload.name):
            queue.restore(folder)
        payload.write_bytes(whole[:-100] + b"\1" + whole[-99:])
        with pytest.raises(tq.Corrupt, match="checksum"):
            queue.restore(folder)
        assert queue.stats().partitions == {}
        payload.write_bytes(whole)
        queue.restore(folder)
        assert queue.partition("p").fetch("t", 1000)["x"].values.tolist() == list(range(1000))
    manifest = folder / "manifest"
    manifest.write_bytes(manifest.read_bytes()[:-1] + b"\0")
    with pytest.raises(tq.StartFailed, match="checksum"):
        tq.serve(1, restore=folder)
    with pytest.raises(tq.StartFailed, match="is no snapshot"):
        tq.serve(1, restore=tmp_path)


async def test_the_async_client_takes_and_restores_too(folder: Path) -> None:
    with tq.serve(1) as server:
        async with await tq.connect_async(server) as queue:
            part = await queue.partition("p", tasks={"t": ["x"]})
            await part.put({"x": np.arange(5)})
            await queue.snapshot(folder)
    with tq.serve(1) as server:
        async with await tq.connect_async(server) as queue:
            await queue.restore(folder)
            part = await queue.partition("p")
            assert (await part.fetch("t", 5))["x"].values.tolist() == [0, 1, 2, 3, 4]


def test_the_command_takes_and_restores(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with tq.serve(1) as server, tq.connect(server) as queue:
        queue.partition("p", tasks={"t": ["x"]}).put({"x": np.arange(5)})
        assert main(["snapshot", server.address, str(folder)]) == 0
        assert main(["restore", server.address, str(folder)]) == 1
    with tq.serve(1) as server, tq.connect(server) as queue:
        assert main(["restore", server.address, str(folder)]) == 0
        assert len(queue.partition("p").fetch("t", 5)) == 5
    said = capsys.readouterr()
    assert str(folder) in said.out
    assert "no partition yet" in said.err


# -- folders that cannot take one, and writers that do not come to an end ------------------------------------


def test_no_folder_ends_the_controller(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    (tmp_path / "odd" / "manifest").mkdir(parents=True)
    with tq.serve(1) as server, tq.connect(server) as queue:
        part = queue.partition("p", tasks={"t": ["x"]})
        part.put({"x": np.arange(3)})
        for name in ("/tmp/a\0b", "/tmp/" + "a" * 5000, "/proc/none", tmp_path / "file", tmp_path / "odd"):
            with pytest.raises(tq.InvalidArgument):
                queue.snapshot(name)
            with pytest.raises(tq.InvalidArgument):
                queue.restore(name)
        queue.snapshot(folder)
        (folder / "payload-old").mkdir()
        with pytest.raises(tq.InvalidArgument, match="payload-old"):
            queue.snapshot(folder)
        (folder / "payload-old").rename(folder / "payload-00000000-0")
        with pytest.raises(tq.InvalidArgument, match="payload-00000000-0"):
            queue.snapshot(folder)
        assert part.fetch("t", 3)["x"].values.tolist() == [0, 1, 2]
        assert server.failure is None


@pytest.fixture
def held_up(folder: Path) -> Iterator[tuple[tq.Server, tq.Client, threading.Thread, list[Any]]]:
    """A store with a journal and 20 samples, one of whose units was stopped in the middle of a snapshot; the
    thread takes it, and lists how it ends.
    """
    with (
        tq.serve(2, journal=folder.parent / "journal") as server,
        tq.connect(server, reconnect_seconds=60) as queue,
    ):
        part = queue.partition("p", tasks={"t": ["x"]})
        for number in range(20):
            part.put({"x": [np.full(100_000, number)]})
        unit = server.processes[-1].pid
        os.kill(unit, signal.SIGSTOP)
        ended: list[Any] = []

        def take() -> None:
            try:
                queue.snapshot(folder, timeout=60)
                ended.append("whole")
            except tq.QueueError as error:
                ended.append(error)

        thread = threading.Thread(target=take)
        try:
            yield server, queue, thread, ended
        finally:
            os.kill(unit, signal.SIGCONT)
            thread.join(60)


def numbers_in(folder: Path) -> list[int]:
    """What a store that is restored from the folder holds."""
    with tq.serve(1, restore=folder) as server, tq.connect(server) as queue:
        part = queue.partition("p")
        return [int(np.asarray(row)[-1]) for row in part.get(part.ledger("t").pending)["x"]]


Eventually = Callable[[Callable[[], bool]], None]


def test_a_second_snapshot_into_a_folder_is_refused_while_one_is_written(
    folder: Path, held_up: Any, eventually: Eventually
) -> None:
    server, queue, thread, ended = held_up
    thread.start()
    eventually(lambda: any(folder.glob("payload-*")))
    with pytest.raises(tq.InvalidArgument, match="another snapshot is being written"):
        queue.snapshot(folder.parent / "journal" / ".." / folder.name)
    with (
        tq.serve(1) as other,
        tq.connect(other) as stranger,
        pytest.raises(tq.InvalidArgument, match="another snapshot is being written"),
    ):
        stranger.snapshot(folder)
    os.kill(server.processes[-1].pid, signal.SIGCONT)
    thread.join(60)
    assert ended == ["whole"]
    assert numbers_in(folder) == list(range(20))


def test_a_snapshot_that_nobody_waits_for_ends_and_leaves_the_one_before(
    folder: Path, eventually: Eventually
) -> None:
    with tq.serve(2) as server, tq.connect(server) as queue:
        part = queue.partition("p", tasks={"t": ["x"]})
        for number in range(20):
            part.put({"x": [np.full(100_000, number)]})
        queue.snapshot(folder)
        before = sorted(folder.iterdir())
        part.drop(part.ledger("t").pending[:10], "past")
        unit = server.processes[-1].pid
        os.kill(unit, signal.SIGSTOP)
        try:
            with pytest.raises(tq.Timeout):
                queue.snapshot(folder, timeout=0.5)
        finally:
            os.kill(unit, signal.SIGCONT)
        eventually(lambda: sorted(folder.iterdir()) == before)
        assert numbers_in(folder) == list(range(20))
        queue.snapshot(folder)
        assert numbers_in(folder) == list(range(10, 20))


def test_a_snapshot_whose_writer_was_killed_is_begun_anew(
    folder: Path, held_up: Any, eventually: Eventually
) -> None:
    server, queue, thread, ended = held_up
    folder.mkdir()
    for name in ("payload-0123abcd-7", "manifest.tmp"):
        (folder / name).write_bytes(b"left by one that died")
    thread.start()
    eventually(lambda: len(list(folder.glob("payload-*"))) > 0 and not (folder / "manifest.tmp").exists())
    server.processes[0].kill()
    server.processes[0].wait(20)
    os.kill(server.processes[-1].pid, signal.SIGCONT)
    thread.join(60)
    assert ended == ["whole"]
    assert numbers_in(folder) == list(range(20))
    queue.snapshot(folder)  # takes away what a unit may have written for the one that was killed
    assert len(list(folder.iterdir())) <= 3  # the manifest, and a file of each unit
    assert numbers_in(folder) == list(range(20))


def test_where_folders_cannot_be_locked_one_process_still_writes_one_snapshot_at_a_time(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.EBADF, "Bad file descriptor")  # as NFS says of a folder

    monkeypatch.setattr(fcntl, "flock", flock)
    first = Target(folder, 1)
    with pytest.raises(tq.InvalidArgument, match="another snapshot is being written"):
        Target(folder, 1)
    first.give_up()
    second = Target(folder, 1)
    assert second.finish([], b"") is None
    Target(folder, 1).give_up()
