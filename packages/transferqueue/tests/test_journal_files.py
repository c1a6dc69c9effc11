"""What a journal leaves on the disk, and what is read of it, whatever cut it short."""

import os
from pathlib import Path

import pytest
import transferqueue as tq
from transferqueue.controller.journal import FolderInUse, Journal, Recovered


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "journal"


def written(folder: Path, turns: list[bytes]) -> Journal:
    journal = Journal(folder)
    assert journal.recover() is None
    assert journal.rewrite(b"state")
    for turn in turns:
        journal.write(turn)
    journal.close()
    return journal


def recovered(folder: Path) -> Recovered | None:
    journal = Journal(folder)
    try:
        return journal.recover()
    finally:
        journal.close()


TURNS = [b"one", b"two" * 1000, b"three", b"four" * 5]


def test_turns_are_read_back(folder: Path) -> None:
    written(folder, TURNS)
    journal = Journal(folder)
    found = journal.recover()
    assert found is not None
    assert (found.state, found.turns) == (b"state", TURNS)
    journal.write(b"five")
    journal.close()
    journal.close()
    again = recovered(folder)
    assert again is not None
    assert again.turns == [*TURNS, b"five"]


def test_a_torn_tail_is_cut_off_at_every_byte(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    written(folder, TURNS)
    path = folder / "journal-0"
    whole = path.read_bytes()
    end = len(whole.rstrip(b"\0"))
    start = whole.rfind(b"TqJ1")
    for stop in range(start + 1, end):
        path.write_bytes(whole[:stop] + bytes(100))
        journal = Journal(folder)
        found = journal.recover()
        assert found is not None
        assert found.turns == TURNS[:-1]
        assert "cut off" in caplog.text
        journal.write(b"next")
        journal.close()
        found = recovered(folder)
        assert found is not None
        assert found.turns == [*TURNS[:-1], b"next"]


def test_damage_in_the_middle_is_refused_with_its_place(folder: Path) -> None:
    written(folder, TURNS)
    path = folder / "journal-0"
    whole = bytearray(path.read_bytes())
    at = whole.find(b"two")
    whole[at] ^= 1
    path.write_bytes(whole)
    with pytest.raises(tq.Corrupt, match=f"damaged at byte {at - 32}") as caught:
        recovered(folder)
    assert "truncate" in str(caught.value)
    assert caught.value.offset == at - 32


def test_a_damaged_state_is_refused(folder: Path) -> None:
    written(folder, TURNS)
    path = folder / "state-0"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(tq.Corrupt, match="state-0"):
        recovered(folder)
    path.unlink()
    with pytest.raises(tq.Corrupt, match="no state-0"):
        recovered(folder)


def test_rewriting_may_be_cut_short_anywhere(folder: Path) -> None:
    """Between any two steps of it the folder has the old state or the new one."""
    written(folder, TURNS)
    steps = [
        lambda: (folder / "state-1.tmp").write_bytes(b"half of it"),
        lambda: (folder / "journal-1").touch(),
    ]
    for step in steps:
        step()
        found = recovered(folder)
        assert found is not None
        assert (found.state, found.turns) == (b"state", TURNS)
    journal = Journal(folder)
    journal.recover()
    journal.write(b"five")
    old = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert journal.rewrite(b"new")
    journal.write(b"six")
    journal.close()
    for name in ("state-0", "journal-0"):  # not removed yet
        (folder / name).write_bytes(old[name])
    found = recovered(folder)
    assert found is not None
    assert (found.state, found.turns) == (b"new", [b"six"])
    assert not (folder / "state-0").exists()


def test_a_write_that_found_no_room_is_tried_again_whole(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(folder, TURNS)
    journal = Journal(folder)
    journal.recover()
    real, calls = os.pwrite, 0

    def half(descriptor: int, data: memoryview, at: int) -> int:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise OSError(28, "No space left on device")
        return real(descriptor, data[:10] if calls == 1 else data, at)

    monkeypatch.setattr(os, "pwrite", half)
    with pytest.raises(OSError, match="No space"):
        journal.write(b"five")
    assert journal.full is not None
    journal.look_for_room()
    journal.write(b"five")
    assert journal.full is None
    journal.close()
    found = recovered(folder)
    assert found is not None
    assert found.turns == [*TURNS, b"five"]


def test_a_folder_is_one_journals(folder: Path) -> None:
    journal = Journal(folder)
    with pytest.raises(FolderInUse, match=str(folder)):
        Journal(folder)
    journal.close()
    Journal(folder).close()


def test_a_record_of_another_place_is_not_taken_for_one(folder: Path) -> None:
    """Records are numbered: a stale one behind the end continues nothing."""
    written(folder, TURNS[:1])
    path = folder / "journal-0"
    record = path.read_bytes().rstrip(b"\0")
    with path.open("r+b") as file:
        file.seek(len(record))
        file.write(record)
    with pytest.raises(tq.Corrupt, match=f"damaged at byte {len(record)}"):
        recovered(folder)
