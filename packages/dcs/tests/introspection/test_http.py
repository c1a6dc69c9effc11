"""What a coordinator answers over HTTP, to whom, and the peers it has to bear."""

import json
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import dcs
import msgspec
import pytest
from dcs.control.views import Topology
from dcs.introspection import IntrospectionServer, endpoint
from dcs.introspection.answers import RECENT_VERSIONS, Versions

Get = Callable[..., tuple[int, bytes, Any]]


def test_the_topology_is_what_the_coordinator_shows(server, get, topology):
    status, body, headers = get(server, "/topology")
    assert status == 200
    assert headers["Content-Type"] == "application/json"
    got = msgspec.json.decode(body, type=Topology)
    assert got.at == topology.at
    assert got.counters == topology.counters
    assert [run.name for run in got.runs] == ["critic", "policy"]
    assert got.runs[1].subscribers == topology.runs[1].subscribers
    assert got.runs[1].ranks == topology.runs[1].ranks
    assert got.runs[1].versions == topology.runs[1].versions[-RECENT_VERSIONS:]


def test_the_topology_reads_as_plain_json(server, get):
    run = json.loads(get(server, "/topology")[1])["runs"][1]
    engine = run["subscribers"][1]
    assert (engine["name"], engine["staged"], engine["acked"], engine["lag"]) == ("engine-1", 8, 7, 1)
    assert (engine["wire"], engine["from_peers"], engine["slow"]) == ("shm", 7 << 20, True)
    assert [source["name"] for source in engine["sources"]] == ["engine-0", "rank-0"]


def test_the_versions_are_all_that_are_remembered(server, get, topology):
    status, body, _ = get(server, "/versions")
    assert status == 200
    got = msgspec.json.decode(body, type=Versions)
    assert [(run.name, len(run.versions)) for run in got.runs] == [("critic", 0), ("policy", 9)]
    assert got.runs[1].versions == topology.runs[1].versions
    assert got.runs[1].versions[-1].complete_at is None


def test_an_address_that_is_none_is_refused_in_words(server):
    with socket.create_connection(("127.0.0.1", server.port), 10) as raw:
        raw.sendall(b"GET http://[::1 HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n")
        answer = raw.makefile("rb").read()
    assert answer.startswith(b"HTTP/1.0 400")
    assert b"is no address" in answer


def test_one_run_can_be_asked_for(server, get):
    for path in ("/versions", "/topology"):
        status, body, _ = get(server, f"{path}?run=policy")
        assert status == 200
        assert [run["name"] for run in json.loads(body)["runs"]] == ["policy"]
        status, body, _ = get(server, f"{path}?run=other")
        assert status == 404
        assert b"no run 'other'" in body
        assert b"policy" in body


def test_metrics_count_what_is_there(server, scraped):
    metrics = scraped(server.url)

    def value(name: str, **labels: str) -> float:
        return metrics[name, frozenset(labels.items())]

    assert value("uptime_seconds") == 3725
    assert value("runs") == 2
    assert [value(f"{name}_total") for name in ("joins", "evictions", "fences", "refusals")] == [20, 4, 6, 3]
    assert [value(f"{name}_total") for name in ("announcements", "completions")] == [19, 9]
    policy = {"run": "policy"}
    assert (value("version", **policy), value("epoch", **policy), value("publisher_up", **policy)) == (
        8,
        3,
        1,
    )
    assert (value("version", run="critic"), value("publisher_up", run="critic")) == (-1, 0)
    assert (value("world_size", **policy), value("ranks_alive", **policy)) == (2, 2)
    assert value("subscribers", **policy) == 2
    assert value("version_bytes", **policy) == 3 << 30
    assert value("version_freeze_seconds", **policy) == 0.25
    assert value("version_announce_seconds", **policy) == 0.5
    assert value("version_staged_subscribers", **policy) == 2
    assert value("version_acked_subscribers", **policy) == 1
    assert value("rank_announced_version", run="policy", rank="0") == 9
    assert value("rank_heard_seconds", run="policy", rank="1") == 0.75
    slow = {"run": "policy", "subscriber": "engine-1"}
    assert (value("staged_version", **slow), value("acked_version", **slow)) == (8, 7)
    assert (value("lag_versions", **slow), value("slow", **slow), value("heard_seconds", **slow)) == (
        1,
        1,
        4.5,
    )
    assert value("subscriber_bytes", **slow) == 1 << 30
    assert value("received_bytes_total", **slow, source="peers") == 7 << 20
    assert value("received_bytes_total", **slow, source="ranks") == 0
    assert value("transfer_seconds", **slow) == 2.5  # of version 7, its last
    assert value("acked_seconds", **slow) == 3.75
    info = {"site": "west", "machine": "host-c", "group": "g", "wire": "shm"}
    assert value("subscriber_info", **slow, **info) == 1
    assert value("transfer_seconds", run="policy", subscriber="engine-0") == 1.5


def test_metrics_come_in_the_format_that_is_asked_for(server, get):
    pytest.importorskip("prometheus_client")
    _, body, headers = get(server, "/metrics", Accept="application/openmetrics-text; version=1.0.0")
    assert headers["Content-Type"].startswith("application/openmetrics-text")
    assert body.endswith(b"# EOF\n")
    assert get(server, "/metrics")[2]["Content-Type"].startswith("text/plain")


def test_without_prometheus_client_the_way_to_it_is_named(server, get, monkeypatch):
    monkeypatch.delitem(sys.modules, "dcs.introspection.metrics", raising=False)
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    status, body, _ = get(server, "/metrics")
    assert status == 501
    assert b"pip install 'relax-dcs[metrics]'" in body
    assert get(server, "/topology")[0] == 200


def test_only_get_of_what_there_is_is_answered(server, get):
    for path in ("/", "/metrics/", "/topology/../../etc/passwd"):
        status, body, _ = get(server, path)
        assert status == 404
        assert b"/versions" in body
    for method in ("POST", "PUT", "DELETE", "HEAD", "OPTIONS", "BREW"):
        status, _, headers = get(server, "/topology", method)
        assert status == 405
        assert headers["Allow"] == "GET"


def test_a_token_is_demanded_for_everything_but_health(serve, get):
    server = serve(token="söcret")
    shown = "söcret".encode().decode("latin-1")
    for path in ("/topology", "/versions", "/metrics", "/nothing"):
        for headers in (
            {}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {shown}"}, {"Authorization": ""}
        ):  # fmt: skip
            status, body, answered = get(server, path, **headers)
            assert status == 401
            assert answered["WWW-Authenticate"].startswith("Bearer")
            assert b"engine" not in body
    assert get(server, "/topology", Authorization=f"Bearer {shown}")[0] == 200
    assert get(server, "/topology", Authorization=f"bearer  {shown} ")[0] == 200
    assert get(server, "/healthz")[:2] == (200, b"ok\n")


def test_off_loopback_a_token_is_required(shown):
    with pytest.raises(dcs.Unauthorized, match=r"HTTP server.*'0\.0\.0\.0'.*without a token"):
        IntrospectionServer(shown, "0.0.0.0")
    with pytest.raises(dcs.Unauthorized, match="empty token"):
        IntrospectionServer(shown, token="")


def test_health_is_that_of_the_coordinator(server, get, shown):
    assert get(server, "/healthz")[0] == 200
    shown.alive = False
    status, body, _ = get(server, "/healthz")
    assert status == 503
    assert b"ended" in body
    assert shown.snapshots == 0


def test_a_coordinator_that_cannot_be_read_is_unavailable(server, get, shown):
    shown.topology = dcs.Closed("this coordinator was closed")
    for path in ("/topology", "/versions", "/metrics"):
        status, body, _ = get(server, path)
        assert status == 503
        assert b"this coordinator was closed" in body


def test_requests_at_the_same_time_share_a_snapshot(server, get, shown):
    began = time.monotonic()
    with ThreadPoolExecutor(8) as together:
        paths = ["/topology", "/versions"] * 32
        statuses = list(together.map(lambda path: get(server, path)[0], paths))
    assert statuses == [200] * 64
    assert shown.snapshots <= 1 + (time.monotonic() - began) / 0.25


def test_a_snapshot_is_not_shared_for_long(server, get, shown, topology, changed, eventually):
    assert get(server, "/topology?run=policy")[0] == 200
    shown.topology = changed(topology, runs=())
    eventually(lambda: get(server, "/topology?run=policy")[0] == 404, 5)


def test_a_long_request_is_hung_up_on(server, get):
    for line in (b"GET /" + b"a" * 40_000, b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 10_000):
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as peer, suppress(OSError):
            peer.sendall(line)
            assert b" 200 " not in peer.recv(4096)
    assert get(server, "/healthz")[0] == 200


def test_a_flood_of_connections_is_bounded(server, get, eventually):
    before = threading.active_count()
    flood = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(60)]
    eventually(lambda: threading.active_count() - before <= 34)
    for one in flood:
        one.close()
    eventually(lambda: get(server, "/topology")[0] == 200)


def test_peers_that_dribble_shut_nobody_out(server, get, eventually):
    before = threading.active_count()
    slow = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(40)]
    for one in slow:
        with suppress(OSError):  # those that came first had to make room
            one.sendall(b"GET /topology HTTP/1.1\r\nX: ")
    for _ in range(5):
        assert get(server, "/topology")[0] == 200
    eventually(lambda: threading.active_count() - before <= 34)
    for one in slow:
        one.close()
    eventually(lambda: threading.active_count() <= before)


@pytest.mark.parametrize("takes", [False, True], ids=["sends", "takes"])
def test_an_exchange_has_to_end_in_time(takes, server, get, monkeypatch, shown, topology, changed):
    monkeypatch.setattr(endpoint, "_EXCHANGE_SECONDS", 0.3)
    shown.topology = changed(topology, runs=topology.runs * 2000)  # more than the sockets buffer
    with socket.create_connection(("127.0.0.1", server.port), timeout=0.1) as slow:
        if takes:
            slow.sendall(b"GET /versions HTTP/1.0\r\n\r\n")
        began, hung_up, got = time.monotonic(), False, 0
        while not hung_up and time.monotonic() - began < 10:
            try:
                if not takes:
                    slow.sendall(b"a")
                piece = slow.recv(1)
                got += len(piece)
                hung_up = not piece
                if piece:
                    threading.Event().wait(0.05)  # it takes a byte now and then
                    if time.monotonic() - began > 2:  # by now it must have been hung up on: read what is left
                        while piece := slow.recv(1 << 20):
                            got += len(piece)
                        hung_up = True
            except TimeoutError:
                continue
            except ConnectionError:
                hung_up = True
        assert hung_up
        assert got < len(msgspec.json.encode(shown.topology)) // 2
    assert get(server, "/healthz")[0] == 200


def test_close_hangs_up_on_everybody_and_leaves_nothing(no_leak, shown, get):
    server = IntrospectionServer(shown)
    silent = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(5)]
    assert get(server, "/topology")[0] == 200
    began = time.monotonic()
    server.close()
    server.close()
    assert time.monotonic() - began < 4
    with pytest.raises(OSError, match="refused"):
        get(server, "/topology")
    for one in silent:
        one.close()


def test_signals_are_left_to_the_program(server, get, shown, topology):
    masks: list[set[int]] = []

    def note() -> Topology:
        masks.append({int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())})
        return topology

    shown.snapshot = note
    server = IntrospectionServer(shown)
    with server:
        assert get(server, "/topology")[0] == 200
    assert [mask >= {signal.SIGINT, signal.SIGTERM, signal.SIGCHLD} for mask in masks] == [True]
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_a_port_that_cannot_be_had_is_named(shown, server):
    with pytest.raises(dcs.DcsError, match=rf"127\.0\.0\.1:{server.port}.*another port"):
        IntrospectionServer(shown, port=server.port)
    with pytest.raises(dcs.DcsError, match="70000"):
        IntrospectionServer(shown, port=70_000)
