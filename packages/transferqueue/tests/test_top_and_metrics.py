"""``transferqueue top`` and ``/metrics`` on real stores."""

import json
import os
import pty
import select
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import pytest
import transferqueue as tq
from transferqueue.cli import main
from transferqueue.introspection.endpoint import serve_metrics
from transferqueue.introspection.extras import MissingExtra

Eventually = Callable[[Callable[[], bool]], None]
Metrics = dict[tuple[str, frozenset[tuple[str, str]]], float]
Scraped = Callable[[str], Metrics]

CLI = [sys.executable, "-c", "import sys; from transferqueue.cli import main; sys.exit(main())"]
TASKS = {"reader": ["tokens"], "judge": ["tokens", "reward"]}


Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs the command in this process; gives its status, output and errors."""

    def in_this_process(*arguments: str, token: str | None = None) -> tuple[int, str, str]:
        monkeypatch.setenv("COLUMNS", "200")
        monkeypatch.delenv("TRANSFERQUEUE_TOKEN", raising=False)
        if token is not None:
            monkeypatch.setenv("TRANSFERQUEUE_TOKEN", token)
        capsys.readouterr()
        status = main(arguments)
        said = capsys.readouterr()
        return status, said.out, said.err

    return in_this_process


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != "TRANSFERQUEUE_TOKEN"}
    return kept | {"COLUMNS": "200"}


@contextmanager
def started(*arguments: str, **options: Any) -> Iterator["subprocess.Popen[str]"]:
    process = subprocess.Popen(
        [*CLI, *arguments],
        text=True,
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": environment()} | options,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=20)


def tokens(rows: int) -> dict[str, Any]:
    return {"tokens": np.zeros((rows, 4), np.int32)}


def value(metrics: Metrics, name: str, **labels: str) -> float:
    return metrics[name, frozenset(labels.items())]


@pytest.fixture
def used(queue: tq.Client, name: str) -> str:
    """A partition where 40 samples were put, of which the task "reader" acked 5, gave 3 back, let 2 lapse and
    holds 4 in two leases; 6 were judged, 1 was dropped.
    """
    part = queue.partition(name, tasks=TASKS, max_samples=64, max_bytes="1MiB")
    ids = part.put(tokens(40), groups=[f"g{i // 4}" for i in range(40)])
    part.fetch("reader", 5).ack()
    part.fetch("reader", 3).nack()
    part.fetch("reader", 2, lease_seconds=0.05)
    part.fetch("reader", 35, timeout=20, lease_seconds=100).nack()  # ready once the two have lapsed
    for _ in range(2):
        held = part.fetch("reader", 2, lease_seconds=100)
        assert len(held) == 2
    part.update(ids[-6:], {"reward": np.zeros(6, np.float32)})
    part.drop(ids[-1:], reason="broken")
    return name


# -- statistics ----------------------------------------------------------------------------------------------


def test_statistics_say_what_was_done(queue: tq.Client, used: str) -> None:
    stats = queue.stats()
    part = stats.partitions[used]
    assert (part.samples, part.groups, part.dropped, part.closed) == (39, 10, 1, False)
    assert (part.put_samples_total, part.updated_total, part.dropped_total) == (40, 6, 1)
    assert (part.max_samples, part.max_bytes) == (64, 1 << 20)
    assert part.put_bytes_total >= 40 * 16
    assert 0 < part.nbytes < part.put_bytes_total
    reader, judge = part.tasks["reader"], part.tasks["judge"]
    assert (reader.unready, reader.ready, reader.leased, reader.acked) == (0, 30, 4, 5)
    assert (reader.leases, reader.acked_total, reader.nacked_total, reader.lapsed_total) == (2, 5, 38, 2)
    assert reader.delivered_total == 5 + 3 + 2 + 35 + 4
    assert (judge.unready, judge.ready) == (34, 5)
    assert 0 < reader.lag < 60
    assert 0 < judge.lag < 60
    assert stats.uptime > 0
    assert stats.clients >= 1
    assert stats.nbytes >= part.nbytes
    assert [unit.unit for unit in stats.units] == [0, 1]
    assert all(unit.alive for unit in stats.units)


def test_who_waits_is_counted(store: tq.Server, name: str, eventually: Eventually) -> None:
    with tq.connect(store) as queue, ThreadPoolExecutor(2) as threads:
        part = queue.partition(name, tasks={"reader": ["tokens"]}, max_samples=2)
        fetching = threads.submit(part.fetch, "reader", 2, timeout=30)
        eventually(lambda: queue.stats().waiting_fetches == 1)
        part.put(tokens(2))
        batch = fetching.result(20)
        putting = threads.submit(part.put, tokens(1), timeout=30)
        eventually(lambda: queue.stats().waiting_puts == 1)
        batch.ack()
        putting.result(20)
        stats = queue.stats()
        assert (stats.waiting_fetches, stats.waiting_puts) == (0, 0)


def test_clients_come_and_go(store: tq.Server, queue: tq.Client, eventually: Eventually) -> None:
    before = queue.stats().clients
    with tq.connect(store), tq.connect(store):
        assert queue.stats().clients == before + 2
    eventually(lambda: queue.stats().clients == before)


def test_memory_that_only_a_reader_keeps_is_counted(
    queue: tq.Client, name: str, eventually: Eventually
) -> None:
    nbytes = 4 << 20
    part = queue.partition(name, tasks={"reader": ["tokens"]})
    before = queue.stats().memory
    part.put({"tokens": np.ones((4, nbytes // 16), np.int32)})
    assert queue.stats().memory.used >= before.used + nbytes
    batch = part.fetch("reader", 4)
    view = batch["tokens"].values
    assert queue.stats().memory.pinned_only < before.pinned_only + nbytes
    batch.ack()
    eventually(lambda: queue.stats().memory.pinned_only >= before.pinned_only + nbytes)
    assert view.sum() == nbytes // 4
    del batch, view
    eventually(lambda: queue.stats().memory.pinned_only < before.pinned_only + nbytes)
    memory = queue.stats().memory
    assert memory.used < before.used + nbytes
    assert 0 <= memory.used + memory.granted <= memory.capacity


# -- metrics -------------------------------------------------------------------------------------------------


def test_a_scrape_equals_the_statistics(queue: tq.Client, used: str, endpoint: str, scraped: Scraped) -> None:
    metrics = scraped(endpoint)
    stats = queue.stats()
    part, reader = stats.partitions[used], stats.partitions[used].tasks["reader"]
    assert value(metrics, "up") == 1
    assert 0 < value(metrics, "uptime_seconds") <= stats.uptime
    for name, truth in {
        "payload_bytes": stats.nbytes,
        "waiting_puts": 0,
        "waiting_fetches": 0,
        "memory_capacity_bytes": stats.memory.capacity,
    }.items():
        assert value(metrics, name) == truth, name
    for name, truth in {
        "samples": 39,
        "partition_payload_bytes": part.nbytes,
        "partition_max_samples": 64,
        "partition_max_bytes": 1 << 20,
        "partition_closed": 0,
        "groups": 10,
        "put_samples_total": 40,
        "put_bytes_total": part.put_bytes_total,
        "updated_samples_total": 6,
        "dropped_samples_total": 1,
    }.items():
        assert value(metrics, name, partition=used) == truth, name
    for name, truth in {
        "unready_samples": 0,
        "ready_samples": 30,
        "leased_samples": 4,
        "leases": 2,
        "delivered_samples_total": 49,
        "acked_samples_total": 5,
        "nacked_samples_total": 38,
        "lapsed_samples_total": 2,
    }.items():
        assert value(metrics, name, partition=used, task="reader") == truth, name
    assert 0 < value(metrics, "lag_seconds", partition=used, task="reader") <= reader.lag
    assert value(metrics, "unready_samples", partition=used, task="judge") == 34
    for unit in stats.units:
        assert value(metrics, "unit_up", unit=str(unit.unit)) == 1
        assert value(metrics, "unit_info", unit=str(unit.unit), address=unit.address) == 1
    assert ("max_bytes", frozenset()) not in metrics  # this store has no limit


def test_labels_carry_any_name(queue: tq.Client, name: str, endpoint: str, scraped: Scraped) -> None:
    odd = f'{name} "quoted"\n\\back {{a="b"}} 漢字'
    queue.partition(odd, tasks={'t"\n': ["tokens"]}).put(tokens(3))
    assert value(scraped(endpoint), "ready_samples", partition=odd, task='t"\n') == 3


def test_the_sidecar_waits_for_its_store_and_ends_on_a_signal(
    eventually: Eventually, scraped: Scraped, free_port: Callable[[], int]
) -> None:
    pytest.importorskip("prometheus_client")
    port = free_port()
    with started("metrics", f"tcp://127.0.0.1:{port}", "--port", "0", "--timeout", "0.5") as process:
        assert process.stdout is not None
        url = process.stdout.readline().split()[-1]
        assert url.startswith("http://127.0.0.1:")
        assert value(scraped(url), "up") == 0
        with tq.serve(port=port):
            eventually(lambda: value(scraped(url), "up") == 1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        assert process.stderr is not None
        said = process.stderr.read()
    assert "does not answer" in said
    assert "answers again" in said
    assert "Traceback" not in said


def test_a_wrong_token_is_refused_by_name(run: Command) -> None:
    pytest.importorskip("prometheus_client")
    with tq.serve(token="s3cret") as store:
        for command in (["top", "--once", "--json"], ["metrics", "--port", "0"]):
            status, out, errors = run(command[0], store.address, *command[1:], token="wr0ng")
            assert status == 1
            assert "the token is missing or wrong" in errors
            assert "s3cret" not in errors + out
            assert "wr0ng" not in errors + out
        with serve_metrics(store, port=0) as server, urllib.request.urlopen(server.url, timeout=20) as answer:
            text = answer.read().decode()
        assert "transferqueue_up 1" in text
        assert "s3cret" not in text
        status, out, _ = run("top", store.address, "--once", "--json", "--interval", "0.1", token="s3cret")
        assert status == 0
        assert json.loads(out)["up"] is True


# -- top -----------------------------------------------------------------------------------------------------


def test_once_shows_the_rates_of_an_interval(
    store: tq.Server, queue: tq.Client, name: str, run: Command
) -> None:
    part = queue.partition(name, tasks={"reader": ["tokens"]})
    stop, put = threading.Event(), [0]

    def produce() -> None:
        while not stop.wait(0.01):
            part.put(tokens(8))
            part.fetch("reader", 8).ack()
            put[0] += 8

    thread = threading.Thread(target=produce)
    thread.start()
    try:
        while not put[0]:
            time.sleep(0.01)
        first, begin = put[0], time.monotonic()
        status, out, errors = run("top", store.address, "--once", "--interval", "0.5", "--json")
        last, seconds = put[0], time.monotonic() - begin
    finally:
        stop.set()
        thread.join(20)
    assert (status, errors) == (0, "")
    [line] = out.splitlines()
    frame = json.loads(line)
    rates = frame["rates"]
    assert 0.5 <= rates["seconds"] < seconds
    puts = rates["partitions"][name]["put_samples"] * rates["seconds"]
    acks = rates["partitions"][name]["tasks"]["reader"]["acked"] * rates["seconds"]
    assert 0 < puts <= last - first + 16
    assert puts == pytest.approx(round(puts), abs=1e-6)
    assert round(puts) % 8 == 0
    assert abs(puts - acks) <= 16
    assert rates["partitions"][name]["put_bytes"] >= 16 * rates["partitions"][name]["put_samples"]
    assert frame["stats"]["partitions"][name]["put_samples_total"] <= last + 8


def test_the_table_has_a_row_for_every_task(store: tq.Server, used: str, run: Command) -> None:
    pytest.importorskip("rich")
    status, out, errors = run("top", store.address, "--once", "--interval", "0.1")
    assert (status, errors) == (0, "")
    [row] = [line for line in out.splitlines() if line.startswith(f"{used} ")]
    assert row.split()[1] == "39/64"
    assert row.split()[-10:-6] == ["reader", "0", "30", "4"]
    assert row.split()[-1] == "2"
    assert "2 of 2 units alive" in out
    assert "\x1b" not in out


def test_no_store_at_the_address_is_said(run: Command, free_port: Callable[[], int]) -> None:
    nowhere = f"127.0.0.1:{free_port()}"
    begin = time.monotonic()
    status, out, errors = run("top", nowhere, "--json", "--timeout", "0.5")
    assert time.monotonic() - begin < 15
    assert (status, out) == (1, "")
    assert nowhere in errors
    for option, value in (("--interval", "0"), ("--timeout", "-1")):
        status, out, errors = run("top", nowhere, option, value)
        assert (status, out) == (1, "")
        assert f"{option[2:]} is {float(value)}" in errors


@pytest.mark.parametrize(
    ("module", "extra", "command"),
    [("rich", "top", ["top", "--once"]), ("prometheus_client", "metrics", ["metrics", "--port", "0"])],
)
def test_a_missing_extra_is_named(
    module: str,
    extra: str,
    command: list[str],
    store: tq.Server,
    run: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for loaded in list(sys.modules):
        if loaded.partition(".")[0] == module:
            monkeypatch.setitem(sys.modules, loaded, None)
    monkeypatch.setitem(sys.modules, module, None)
    for ours in ("table", "metrics"):
        monkeypatch.delitem(sys.modules, f"transferqueue.introspection.{ours}", raising=False)
    status, _, errors = run(command[0], store.address, *command[1:])
    assert status == 1
    assert f"pip install 'relax-transferqueue[{extra}]'" in errors
    assert issubclass(MissingExtra, (tq.QueueError, ImportError))


def test_top_outlives_a_restart_of_the_store(free_port: Callable[[], int]) -> None:
    port = free_port()
    store = tq.serve(port=port)
    try:
        with started("top", store.address, "--json", "--interval", "0.1", "--timeout", "0.5") as process:
            assert process.stdout is not None
            lines = (json.loads(line) for line in process.stdout)
            assert next(lines)["rates"] is None
            assert next(lines)["rates"]["seconds"] > 0.05
            store.close()
            away = next(frame for frame in lines if not frame["up"])
            assert away["error"]
            store = tq.serve(port=port)
            back = next(frame for frame in lines if frame["up"])
            assert (back["restarted"], back["rates"], back["error"]) == (True, None, None)
            after = next(lines)
            assert after["rates"]["seconds"] > 0.05
            assert after["restarted"] is False
    finally:
        store.close()


def test_ctrl_c_ends_top_quietly(store: tq.Server) -> None:
    with started("top", store.address, "--json", "--interval", "30") as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""


def test_a_closed_output_ends_top_quietly(store: tq.Server) -> None:
    for form in ([], ["--json"]):
        if not form:
            pytest.importorskip("rich")
        with started("top", store.address, "--interval", "0.05", *form) as process:
            assert process.stdout is not None
            assert process.stdout.readline()
            process.stdout.close()
            assert process.wait(20) == 0
            assert process.stderr is not None
            assert process.stderr.read() == ""
            process.stdout = None


def test_on_a_terminal_top_redraws_and_leaves_it_as_it_was(store: tq.Server, used: str) -> None:
    pytest.importorskip("rich")
    ours, theirs = pty.openpty()
    terminal = environment() | {"TERM": "xterm-256color", "LINES": "40"}
    deadline = time.monotonic() + 20
    with started("top", store.address, "--interval", "0.1", stdout=theirs, env=terminal) as process:
        os.close(theirs)
        seen = b""
        while seen.count(used.encode()) < 3:
            ready, _, _ = select.select([ours], [], [], 20)
            assert ready and time.monotonic() < deadline, seen  # noqa: PT018
            seen += os.read(ours, 65_536)
        process.send_signal(signal.SIGTERM)
        with suppress(OSError):  # EIO: the other end is closed
            while chunk := os.read(ours, 65_536):
                seen += chunk
        assert process.wait(20) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""
    os.close(ours)
    enter, leave, show_cursor = b"\x1b[?1049h", b"\x1b[?1049l", b"\x1b[?25h"
    assert seen.index(enter) < seen.index(leave)
    assert show_cursor in seen[seen.index(leave) - 32 :]


def test_a_store_serves_its_own_metrics_until_it_closes() -> None:
    pytest.importorskip("prometheus_client")
    with tq.serve(1, token="secret", curve=True, metrics_port=0) as server:
        assert server.metrics_url is not None
        with urllib.request.urlopen(server.metrics_url, timeout=20) as answer:
            assert b"transferqueue_up 1.0" in answer.read()
    with pytest.raises((urllib.error.URLError, ConnectionError)):
        urllib.request.urlopen(server.metrics_url, timeout=5)
