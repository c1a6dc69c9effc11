"""Sizes in a configuration: bytes, text, or a share of the memory that there is."""

from pathlib import Path

import pytest
from relax.config import ConfigError, load
from relax.config.sizes import bytes_of, memory_there

MANY = 1 << 62


def test_a_size_is_bytes_or_text_or_a_share_of_memory() -> None:
    assert bytes_of(4096) == 4096
    assert bytes_of("2GiB") == 2 << 30
    assert bytes_of("1 MB") == 10**6
    assert bytes_of("100%") == memory_there()
    assert bytes_of(" 12.5 %") == pytest.approx(memory_there() / 8, abs=1)


@pytest.mark.parametrize("size", ["0%", "101%", "much", "-1", "0", "25 per cent", ""])
def test_what_is_no_size_is_refused_with_the_key_and_the_way_out(size: str) -> None:
    with pytest.raises(ConfigError, match=r"queue\.max_bytes = .* (give bytes|give more than 0%)"):
        load(None, ["data=x.jsonl", f"queue.max_bytes={size!r}"])


def test_a_size_is_kept_as_it_was_given() -> None:
    assert load(None, ["data=x.jsonl", "queue.max_bytes=8GiB"]).queue.max_bytes == "8GiB"
    assert load(None, ["data=x.jsonl", "queue.max_bytes=5000"]).queue.max_bytes == 5000
    assert load(None, ["data=x.jsonl"]).queue.max_bytes == "25%"


def group(folder: Path, file: str, text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / file).write_text(f"{text}\n")


def membership(folder: Path, line: str) -> Path:
    group(folder / "self", "cgroup", line)
    return folder


def test_memory_is_that_of_the_tightest_control_group_above_this_process(tmp_path: Path) -> None:
    proc, cgroups = membership(tmp_path / "proc", "0::/pod/box"), tmp_path / "cgroups"
    unlimited = memory_there(proc, cgroups)
    group(cgroups / "pod" / "box", "memory.max", "max")
    assert memory_there(proc, cgroups) == unlimited
    group(cgroups / "pod" / "box", "memory.max", "7000")
    group(cgroups / "pod", "memory.max", "5000")
    group(cgroups, "memory.max", str(MANY))
    assert memory_there(proc, cgroups) == 5000


def test_memory_is_read_from_control_groups_of_version_1_too(tmp_path: Path) -> None:
    lines = "5:cpu,cpuacct:/box\n4:memory:/box\n0::/"
    proc, cgroups = membership(tmp_path / "proc", lines), tmp_path / "cgroups"
    group(cgroups / "memory" / "box", "memory.limit_in_bytes", "6000")
    group(cgroups / "cpu,cpuacct" / "box", "memory.limit_in_bytes", "1")
    assert memory_there(proc, cgroups) == 6000


def test_without_control_groups_memory_is_that_of_the_machine(tmp_path: Path) -> None:
    assert memory_there(tmp_path / "proc", tmp_path / "cgroups") > 1 << 20
