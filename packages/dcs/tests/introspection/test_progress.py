"""The progress bar of transfers."""

import io

import pytest
from dcs.introspection import progress
from dcs.introspection.progress import TransferBar, bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(params=["rich", "plain"])
def terminal(request, monkeypatch) -> Terminal:
    if request.param == "rich":
        pytest.importorskip("rich")
        monkeypatch.setenv("TERM", "xterm")
    else:
        monkeypatch.setattr(progress, "find_spec", lambda name: None)
    monkeypatch.setattr(progress, "_REFRESH_SECONDS", 0.0)
    return Terminal()


def made(terminal: Terminal) -> TransferBar:
    made = bar("weights", terminal)
    assert made is not None
    return made


def test_without_a_terminal_there_is_none(capsys):
    assert bar(out=io.StringIO()) is None
    assert bar() is None


def test_a_transfer_is_drawn_until_it_is_whole(terminal):
    show = made(terminal)
    show(0, 8 << 20, 3)
    show(4 << 20, 8 << 20, 3)
    half = terminal.getvalue()
    assert "weights 3" in half
    assert "4.2/8.4 MB" in half or "4.0/8.0 MiB" in half or "50% of 8.0 MiB" in half
    show(8 << 20, 8 << 20, 3)
    whole = terminal.getvalue()
    assert whole.endswith("\n")
    assert "8.0/8.0 MiB" in whole or "100% of 8.0 MiB" in whole
    show(8 << 20, 8 << 20, 3)  # said again
    show.close()
    show.close()
    assert terminal.getvalue() == whole


def test_a_newer_version_begins_a_bar_of_its_own(terminal):
    show = made(terminal)
    show(10, 100, 3)
    show(20, 100, 4)
    assert "weights 3" in terminal.getvalue()
    assert "\n" in terminal.getvalue()
    show(100, 100, 4)
    assert "weights 4" in terminal.getvalue()
    assert terminal.getvalue().count("\n") >= 2


def test_many_calls_draw_little(terminal, monkeypatch):
    monkeypatch.setattr(progress, "_REFRESH_SECONDS", 3600.0)
    show = made(terminal)
    show(0, 1000, 1)
    before = terminal.getvalue()
    for done in range(1, 1000):
        show(done, 1000, 1)
    assert terminal.getvalue() == before
    show(1000, 1000, 1)
    assert terminal.getvalue().endswith("\n")


def test_nothing_to_transfer_is_whole_at_once(terminal):
    show = made(terminal)
    show(0, 0, 1)
    assert terminal.getvalue().endswith("\n")


def test_the_cursor_stays(terminal):
    show = made(terminal)
    show(1, 2, 1)
    assert "\x1b[?25l" not in terminal.getvalue()
    show.close()
