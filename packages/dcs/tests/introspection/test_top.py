"""`dcs top`: what people see, when it ends, and what it says when it cannot show anything."""

import http.server
import io
import os
import pty
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import dcs
import msgspec
import pytest
from dcs.cli import main
from dcs.control.messages import Endpoint
from dcs.control.views import SubscriberView, Topology
from dcs.introspection import IntrospectionServer, plain, rows
from dcs.introspection.extras import MissingExtra
from dcs.introspection.frames import Frame, frames
from dcs.introspection.reader import Reading, TopologyReader

CLI = [sys.executable, "-m", "dcs.cli", "top"]


@pytest.fixture
def top(monkeypatch, capsys) -> Callable[..., tuple[int, str, str]]:
    """Runs the command in this process; gives its status, output and errors."""

    def run(*arguments: str, token: str | None = None) -> tuple[int, str, str]:
        monkeypatch.delenv("DCS_TOKEN", raising=False)
        if token is not None:
            monkeypatch.setenv("DCS_TOKEN", token)
        capsys.readouterr()
        status = main(["top", *arguments])
        said = capsys.readouterr()
        return status, said.out, said.err

    return run


@contextmanager
def started(
    *arguments: str, stdout: int, stdin: int = subprocess.DEVNULL, env: dict[str, str] | None = None
) -> Iterator["subprocess.Popen[bytes]"]:
    process = subprocess.Popen(
        [*CLI, *arguments], stderr=subprocess.PIPE, stdout=stdout, stdin=stdin, env=env
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=20)


def test_once_prints_what_is_there(server, top):
    status, out, err = top(server.url, "--once")
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == (
        f"dcs at {server.url}   up 1 h 2 min   2 runs   9 versions   4 evictions   3 refusals"
    )
    assert "critic   epoch 1   version -   no ranks, publisher lost   0 subscribers" in lines
    (policy,) = [line for line in lines if line.startswith("policy")]
    assert "epoch 3   version 8   2 of 2 ranks, publisher alive   2 subscribers" in policy
    assert "3.0 GiB frozen in 250.0 ms, 60 s ago" in policy
    assert policy.endswith("version 9: 1 of 2 ranks announced")
    titles, slow, fast = (line.split() for line in lines if line.startswith("  ") and "gone" not in line)
    assert titles == list(rows.COLUMNS)
    assert fast == [
        "engine-0", "8", "8", "0", "tcp+delta", "rank", "0", "1.5", "s", "2.0", "ms", "2,147", "5.0", "GiB",
        "0.2", "s",
    ]  # fmt: skip
    assert slow == [
        "engine-1", "8", "7", "1", "shm", "engine-0", "+1", "2.5", "s", "2.0", "ms", "429", "7.0", "MiB",
        "4.5", "s", "slow",
    ]  # fmt: skip
    (gone,) = [line for line in lines if "gone" in line]
    assert "gone 12 s ago: subscriber engine-7: engine-7 was evicted: no heartbeat for 5.0 s" in gone


def test_addresses_may_be_written_without_a_scheme(server, top):
    status, out, _ = top(f"127.0.0.1:{server.port}", "--once")
    assert status == 0
    assert "engine-1" in out


def test_a_coordinator_without_runs_says_so(server, top, shown, topology, changed):
    shown.topology = changed(topology, runs=())
    assert "no runs yet" in top(server.url, "--once")[1]


def test_the_token_comes_from_the_environment(serve, top):
    server = serve(token="sëcret")
    for wrong in (None, "wrong"):
        status, out, err = top(server.url, "--once", token=wrong)
        assert (status, out) == (1, "")
        assert err == f"dcs top: {server.url} wants another token; set DCS_TOKEN to the coordinator's\n"
    assert top(server.url, "--once", token="sëcret")[0] == 0


def test_nothing_that_answers_is_said_in_one_line(top, shown):
    server = IntrospectionServer(shown)
    server.close()
    status, out, err = top(server.url, "--once")
    assert (status, out) == (1, "")
    assert err.startswith(f"dcs top: nothing answers at {server.url} (")
    assert "is `dcs serve --http-port` running there?" in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["tcp://127.0.0.1:7000"], "where members reach the coordinator; give the HTTP address"),
        (["ftp://127.0.0.1:7000"], "no address of an HTTP server"),
        (["http://"], "no address of an HTTP server"),
        (["127.0.0.1:99999"], "no address of an HTTP server"),
        (["127.0.0.1:1", "--interval", "0"], "interval is 0.0"),
        (["127.0.0.1:1", "--timeout", "nan"], "timeout is nan"),
    ],
)
def test_arguments_that_cannot_be_meant_are_named(top, arguments, words):
    status, out, err = top(*arguments)
    assert (status, out) == (1, "")
    assert words in err


def test_another_server_is_told_from_a_coordinator(top, stack):
    class Other(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"runs": 3}')

        def log_message(self, format: str, *args: object) -> None:
            pass

    other = stack.enter_context(http.server.HTTPServer(("127.0.0.1", 0), Other))
    thread = threading.Thread(target=other.serve_forever, args=(0.05,))
    thread.start()
    stack.callback(thread.join)
    stack.callback(other.shutdown)
    status, _, err = top(f"127.0.0.1:{other.server_port}", "--once")
    assert status == 1
    assert "not the HTTP server of a dcs coordinator" in err


def test_a_coordinator_that_cannot_be_read_is_no_answer(top, server, shown):
    shown.topology = dcs.Closed("this coordinator was closed")
    status, _, err = top(server.url, "--once")
    assert status == 1
    assert "does not answer: this coordinator was closed" in err


def test_a_slow_answer_ends_at_the_timeout(top, serve, shown, topology):
    held = threading.Event()

    def read() -> Topology:
        held.wait(20)
        return topology

    shown.snapshot = read
    server = serve()
    began = time.monotonic()
    status, _, err = top(server.url, "--once", "--timeout", "0.2")
    assert status == 1
    assert "did not answer within 0.2 s" in err
    assert time.monotonic() - began < 5
    held.set()


def test_frames_go_on_while_the_coordinator_is_away(shown, topology, changed, stack):
    first = IntrospectionServer(shown)
    reader = TopologyReader(first.url, timeout=2)
    shown.topology = changed(topology, uptime_seconds=10.0)
    pictures = frames(reader, reader.read(), 1.0, lambda seconds: None)
    assert next(pictures).notice is None
    first.close()
    away = next(pictures)
    assert away.notice is not None
    assert "trying again: nothing answers" in away.notice
    assert away.reading.topology.runs == topology.runs or away.reading.topology.uptime_seconds == 10.0
    shown.topology = changed(topology, uptime_seconds=0.5, runs=())
    stack.enter_context(IntrospectionServer(shown, port=first.port))
    back = next(pictures)
    assert back.away is None
    assert back.reading.topology.runs == ()
    assert back.notice is not None
    assert "was restarted" in back.notice


def test_whoever_refuses_ends_the_frames(shown, stack):
    first = IntrospectionServer(shown)
    reader = TopologyReader(first.url)
    pictures = frames(reader, reader.read(), 1.0, lambda seconds: None)
    next(pictures)
    first.close()
    stack.enter_context(IntrospectionServer(shown, port=first.port, token="new"))
    with pytest.raises(dcs.Unauthorized):
        next(pictures)


def test_names_cannot_move_the_cursor(topology, changed):
    run = topology.runs[1]
    nasty = changed(run.subscribers[0], name="\x1b[2Jboo\n\x07", wire="\x9b31m")
    hostile = changed(
        topology,
        runs=(changed(run, name="\x1b]0;title\x07", subscribers=(nasty,)),),
    )
    text = plain.text(Frame("http://h:1", Reading(time.monotonic(), hostile)))
    assert "\\x1b[2Jboo\\n\\x07" in text
    assert not {"\x1b", "\x07", "\x9b"} & set(text)


def test_whoever_lags_most_comes_first(topology, changed):
    endpoint = Endpoint("10.0.0.1", 7000)
    subscribers = tuple(
        SubscriberView(
            f"e{lag}", 20 + lag, "", "", "", "l", endpoint, (), -1, -1, lag, 0.1, "", 0, 0, False, 0
        )
        for lag in (0, 3, 1, 2)
    )
    run = changed(topology.runs[1], subscribers=subscribers)
    names = [row["subscriber"].text for row in rows.of_subscribers(run, topology)]
    assert names == ["e3", "e2", "e1", "e0"]


def test_a_narrow_terminal_leaves_columns_out(topology):
    console = pytest.importorskip("rich.console")
    from dcs.introspection.table import render

    frame = Frame("http://h:1", Reading(time.monotonic(), topology))
    shown = {}
    for width in (70, 200):
        out = io.StringIO()
        screen = console.Console(file=out, width=width)
        screen.print(render(frame, screen))
        shown[width] = out.getvalue()
        assert max(map(len, shown[width].splitlines())) <= width
        assert "engine-1" in shown[width]
        assert "slow" in shown[width]
    assert "received" in shown[200]
    assert "received" not in shown[70]


def test_without_rich_the_way_to_it_is_named(server, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    monkeypatch.delitem(sys.modules, "dcs.introspection.table", raising=False)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert main(["top", server.url]) == 1
    assert "pip install 'relax-dcs[top]'" in capsys.readouterr().err
    assert issubclass(MissingExtra, dcs.DcsError)
    assert main(["top", server.url, "--once"]) == 0  # needs none


def _read_until(descriptor: int, wanted: bytes, seconds: float = 30.0) -> bytes:
    got, deadline = b"", time.monotonic() + seconds
    while wanted not in got:
        readable, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
        assert readable, got
        got += os.read(descriptor, 1 << 16)
    return got


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_live_table_and_puts_the_terminal_in_order(number, server):
    pytest.importorskip("rich")
    near, far = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "160", "LINES": "40"}
    with started(server.url, "--interval", "60", stdout=far, stdin=far, env=environment) as process:
        os.close(far)
        assert b"\x1b[?1049h" in _read_until(near, b"engine-1")
        process.send_signal(number)
        assert process.wait(20) == 0
        left = b""
        while select.select([near], [], [], 0.5)[0]:
            try:
                piece = os.read(near, 1 << 16)
            except OSError:  # how a terminal without programs ends
                break
            left += piece
        assert b"\x1b[?1049l" in left  # the screen from before
        assert b"\x1b[?25h" in left  # the cursor
    os.close(near)


def test_a_pipe_gets_one_frame_after_the_other_until_it_is_closed(server):
    with started(server.url, "--interval", "0.05", stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        found = 0
        while found < 3:
            line = process.stdout.readline()
            assert line, "it ended"
            found += line.startswith(b"  engine-1")
        process.stdout.close()
        assert process.wait(20) == 0
        assert process.stderr is not None
        assert process.stderr.read() == b""
        process.stdout = None


def test_the_topology_survives_json(topology):
    encoded = msgspec.json.encode(topology)
    assert msgspec.json.decode(encoded, type=type(topology)) == topology
