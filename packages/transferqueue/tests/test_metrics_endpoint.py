"""``/metrics`` and the peers that it has to bear."""

import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import psutil
import pytest
import transferqueue as tq
from transferqueue.introspection.endpoint import serve_metrics
from transferqueue.introspection.reader import GONE, StatsReader

Eventually = Callable[[Callable[[], bool]], None]
Metrics = dict[tuple[str, frozenset[tuple[str, str]]], float]
Scraped = Callable[[str], Metrics]


def value(metrics: Metrics, name: str, **labels: str) -> float:
    return metrics[name, frozenset(labels.items())]


def test_only_get_of_metrics_is_answered(endpoint: str) -> None:
    for url, method, status in (
        (endpoint.removesuffix("metrics"), "GET", 404),
        (endpoint + "/../../etc/passwd", "GET", 404),
        (endpoint, "POST", 405),
    ):
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=20)
        assert refused.value.code == status
        refused.value.close()


def test_a_dead_store_is_a_scrape_that_says_so(
    eventually: Eventually, scraped: Scraped, free_port: Callable[[], int]
) -> None:
    pytest.importorskip("prometheus_client")
    port, told = free_port(), []
    with serve_metrics(f"127.0.0.1:{port}", port=0, timeout=0.5, on_change=told.append) as server:
        assert scraped(server.url) == {("up", frozenset()): 0.0}
        with tq.serve(port=port):
            eventually(lambda: value(scraped(server.url), "up") == 1)
        begin = time.monotonic()
        assert scraped(server.url) == {("up", frozenset()): 0.0}
        assert time.monotonic() - begin < 10
        with tq.serve(port=port) as store, tq.connect(store) as queue:  # another one; its totals begin again
            queue.partition("again", tasks={"t": ["x"]}).put({"x": [1, 2]})
            eventually(lambda: value(scraped(server.url), "up") == 1)
            assert value(scraped(server.url), "put_samples_total", partition="again") == 2
    assert [error is None for error in told] == [False, True, False, True]


@pytest.mark.slow
def test_a_stopped_store_does_not_hang_a_scrape(eventually: Eventually, scraped: Scraped) -> None:
    pytest.importorskip("prometheus_client")
    with tq.serve() as store, serve_metrics(store, port=0, timeout=0.5) as server:
        assert value(scraped(server.url), "up") == 1
        store.processes[0].send_signal(signal.SIGSTOP)
        try:
            begin = time.monotonic()
            assert scraped(server.url) == {("up", frozenset()): 0.0}
            assert time.monotonic() - begin < 10
        finally:
            store.processes[0].send_signal(signal.SIGCONT)
        eventually(lambda: value(scraped(server.url), "up") == 1)


def test_signals_are_left_to_the_program(scraped: Scraped, free_port: Callable[[], int]) -> None:
    pytest.importorskip("prometheus_client")
    masks: list[set[Any]] = []

    def note(error: tq.QueueError | None) -> None:
        masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, ()))

    mine = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with serve_metrics(f"127.0.0.1:{free_port()}", port=0, timeout=0.1, on_change=note) as server:
        scraped(server.url)
    assert [mask >= {signal.SIGINT, signal.SIGTERM, signal.SIGCHLD} for mask in masks] == [True]
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == mine


def test_many_scrapes_leave_no_thread_and_no_descriptor(
    endpoint: str, eventually: Eventually, scraped: Scraped
) -> None:
    me = psutil.Process()
    for _ in range(5):
        scraped(endpoint)
    fds, threads = me.num_fds(), me.num_threads()
    for _ in range(10):
        scraped(endpoint)
    with ThreadPoolExecutor(8) as together:
        assert all(value(one, "up") == 1 for one in together.map(scraped, [endpoint] * 40))
    eventually(lambda: me.num_fds() <= fds and me.num_threads() <= threads)


def test_looking_for_a_store_that_is_away_leaves_nothing_behind(
    eventually: Eventually, free_port: Callable[[], int]
) -> None:
    reader, me = StatsReader(f"127.0.0.1:{free_port()}", timeout=0.02), psutil.Process()

    def look(times: int) -> tuple[int, int]:
        for _ in range(times):
            with pytest.raises(GONE):
                reader.read()
        return me.num_fds(), me.num_threads()

    fds, threads = look(5)
    look(40)
    eventually(lambda: me.num_fds() <= fds and me.num_threads() <= threads)
    reader.close()
    reader.close()


def test_close_ends_silent_connections_and_every_thread(
    store: tq.Server, scraped: Scraped, eventually: Eventually
) -> None:
    pytest.importorskip("prometheus_client")
    before = threading.active_count()
    server = serve_metrics(store, port=0)
    silent = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(5)]
    assert value(scraped(server.url), "up") == 1
    begin = time.monotonic()
    server.close()
    server.close()
    assert time.monotonic() - begin < 4
    eventually(lambda: threading.active_count() <= before)
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(server.url, timeout=5)
    for one in silent:
        one.close()


def test_a_flood_of_connections_is_bounded(endpoint: str, eventually: Eventually, scraped: Scraped) -> None:
    port = int(endpoint.split(":")[2].split("/")[0])
    before = threading.active_count()
    flood = [socket.create_connection(("127.0.0.1", port)) for _ in range(60)]
    eventually(lambda: threading.active_count() - before <= 34)
    for one in flood:
        one.close()

    def answers() -> bool:
        with suppress(OSError):
            return value(scraped(endpoint), "up") == 1
        return False

    eventually(answers)


def test_peers_that_dribble_shut_no_scrape_out(
    endpoint: str, eventually: Eventually, scraped: Scraped
) -> None:
    port = int(endpoint.split(":")[2].split("/")[0])
    before = threading.active_count()
    slow = [socket.create_connection(("127.0.0.1", port)) for _ in range(40)]
    for one in slow:
        with suppress(OSError):  # those that came first had to make room
            one.sendall(b"GET /metrics HTTP/1.1\r\nX: ")
    for _ in range(5):
        assert value(scraped(endpoint), "up") == 1
    eventually(lambda: threading.active_count() - before <= 34)
    for one in slow:
        one.close()
    eventually(lambda: threading.active_count() <= before)


def test_a_request_has_to_arrive_in_time(
    endpoint: str, monkeypatch: pytest.MonkeyPatch, scraped: Scraped
) -> None:
    monkeypatch.setattr("transferqueue.introspection.endpoint._REQUEST_SECONDS", 0.5)
    with socket.create_connection(
        ("127.0.0.1", int(endpoint.split(":")[2].split("/")[0])), timeout=0.1
    ) as slow:
        began = time.monotonic()
        hung_up = False
        while not hung_up and time.monotonic() - began < 10:
            try:
                slow.sendall(b"a")
                hung_up = not slow.recv(1)
            except TimeoutError:
                continue
            except ConnectionError:
                hung_up = True
        assert hung_up
    assert value(scraped(endpoint), "up") == 1


def test_a_shared_client_stays_open(store: tq.Server, queue: tq.Client, scraped: Scraped) -> None:
    pytest.importorskip("prometheus_client")
    with serve_metrics(queue, port=0) as server:
        assert value(scraped(server.url), "up") == 1
    assert queue.stats().uptime > 0


def test_a_port_in_use_is_named(store: tq.Server) -> None:
    pytest.importorskip("prometheus_client")
    with (
        serve_metrics(store, port=0) as server,
        pytest.raises(tq.StartFailed, match=f"127.0.0.1:{server.port}.*another port"),
    ):
        serve_metrics(store, port=server.port)
    with pytest.raises(tq.InvalidArgument, match="70000"):
        serve_metrics(store, port=70_000)
