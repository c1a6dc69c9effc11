"""The benchmark of dcs: what its claims rest on, and some of its goals run for real."""

import itertools
import json
import math
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import xxhash
from measure.child import ChildError  # pyright: ignore[reportMissingImports] - see conftest
from weights_goals import delta, peers, sides  # pyright: ignore[reportMissingImports]
from weights_goals.workers import together  # pyright: ignore[reportMissingImports]
from weights_sides import (  # pyright: ignore[reportMissingImports]
    payload,
    shards,
    socket_bytes,
    verifying,
)

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
MEGABYTES = 8


@pytest.fixture
def some_sides() -> Iterator[sides.Sides]:
    with sides.Sides(quick=True, megabytes=MEGABYTES) as entered:
        yield entered


@pytest.fixture(scope="module")
def shared_sides() -> Iterator[sides.Sides]:
    """As each process takes seconds to start; whoever uses them gives two back."""
    with sides.Sides(quick=True, megabytes=MEGABYTES) as entered:
        yield entered


def run(*names: str, timeout: float = 110) -> list[dict]:
    """The lines of a quick run of some goals, at a tiny size; of all without names."""
    only = [word for name in names for word in ("--only", name)]
    command = [sys.executable, str(BENCHMARKS / "weights.py"), "--quick", "--megabytes", str(MEGABYTES)]
    done = subprocess.run([*command, *only], capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def require_well_formed(lines: list[dict]) -> dict[str, dict]:
    """A machine, then claims and lines of what is skipped; the claims by name, each once."""
    machine, *rest = lines
    assert machine["machine"]["cores"] >= 1
    claims = [line for line in rest if "claim" in line]
    assert all(line["skipped"] and line["why"] for line in rest if line not in claims)
    for line in claims:
        assert math.isfinite(line["value"])
        assert (line["goal"] is None) == (line["ok"] is None)
        assert line["how"]
    by_name = {line["claim"]: line for line in claims}
    assert len(by_name) == len(claims)
    return by_name


def test_goals_run_for_real_and_print_a_machine_and_then_claims():
    claims = require_well_formed(run("pause"))
    goals = {claim: line["goal"] for claim, line in claims.items() if line["goal"]}
    assert goals == {
        "pause, staged in its own slot: over the bytes by copy bandwidth": "<= 1.2",
        "pause, staged in the trainer's memory, mapped: over the bytes by copy bandwidth": "<= 1.2",
    }


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_goal_of_the_table_is_a_claim():
    claims = require_well_formed(run(timeout=580))
    goals = {claim for claim, line in claims.items() if line["goal"]}
    for words in (
        "tcp, one to 4: what verifying every chunk adds",
        "against gloo, bucketed broadcast",
        "against gloo, a broadcast a tensor",
        "root egress with relays, 4 receivers",
        "reshard TP4 -> TP1",
        "same host, four receivers, mapped",
        "delta, plain: times smaller",
        "delta, zstd: times smaller",
        "delta, plain: apply",
        "pause, staged",
        "kill -9 of a relay",
        "kill -9 of a receiver",
        "sentinel readers, tcp",
        "joiner with two live peers",
        "replicas: what saving every step adds",
    ):
        assert any(claim.startswith(words) for claim in goals), words
    for claim, line in claims.items():  # what no load changes
        if any(words in claim for words in ("reshard", "egress", "joiner", "torn", "smaller")):
            assert line["ok"] in (True, None), line


def test_a_goal_that_does_not_exist_is_refused_by_name():
    command = [sys.executable, str(BENCHMARKS / "weights.py"), "--only", "speed"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "speed" in done.stderr
    assert "reshard" in done.stderr


def test_the_sockets_in_c_bring_every_byte_to_every_receiver(some_sides):
    with peers.c_sockets(some_sides, 3) as rounds:  # raises when a receiver has other bytes
        found = rounds["C"]()
    assert found["wall"] > 0
    assert found["cpu"] > 0


def test_without_a_compiler_the_sockets_in_c_are_skipped_with_one_line(
    some_sides, monkeypatch, tmp_path, capsys
):
    monkeypatch.setenv("PATH", str(tmp_path))
    for _ in range(2):
        with peers.c_sockets(some_sides, 1) as rounds:
            assert rounds == {}
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["why"] == "gcc is not installed; the system's package manager has it"


def test_a_package_that_is_missing_is_skipped_with_one_line(some_sides, capsys):
    assert some_sides.has("torch", "torch.save")
    assert not some_sides.has("no_such_package", "a peer")
    assert not some_sides.has("no_such_package", "a peer")
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["skipped"] == "a peer"
    assert "no_such_package" in json.loads(line)["why"]


def test_peers_bring_the_weights_and_a_process_takes_one_role_after_another(shared_sides, tmp_path):
    with peers.gloo(shared_sides, 1, MEGABYTES * 1_000_000, 4) as rounds:  # raises for other weights
        assert all(figure > 0 for once in rounds.values() for figure in once().values())
    before = {child.pid for child in shared_sides._idle}
    with peers.files(shared_sides, 1, {"torch": tmp_path, "safetensors": tmp_path}) as rounds:
        assert all(figure > 0 for once in rounds.values() for figure in once().values())
        assert list(tmp_path.iterdir()) == []
    assert {child.pid for child in shared_sides._idle} == before


def test_a_process_that_was_killed_is_seen_and_takes_no_other_role(shared_sides, tmp_path):
    role = ("file_user", {"nbytes": 1000})
    with shared_sides.workers([role, role]) as (victim, survivor):
        survivor.ask("save", path=str(tmp_path / "weights"), kind="safetensors", version=3)
        victim.kill()
        with pytest.raises(ChildError, match="ended"):
            victim.answer()
        words = {"path": str(tmp_path / "weights"), "kind": "safetensors", "version": 3}
        (answer,) = together([survivor], "load", **words)
        assert answer["done"] > 0
    assert [child.pid for child in shared_sides._idle] == [survivor.pid]


def test_no_process_is_in_two_roles_whatever_becomes_of_the_list(shared_sides):
    role = ("file_user", {"nbytes": 1000})
    with shared_sides.workers([role]) as ours, shared_sides.workers([role]) as others:
        ours[0] = others[0]
    idle = [child.pid for child in shared_sides._idle]
    assert len(idle) == len(set(idle))


def test_a_process_that_failed_takes_no_other_role(shared_sides):
    with (
        pytest.raises(ChildError, match="nowhere"),
        shared_sides.workers([("file_user", {"nbytes": 1000})]) as (one,),
    ):
        one.ask("load", path="nowhere", kind="torch", version=1)
    assert one.pid not in {child.pid for child in shared_sides._idle}


def test_receivers_with_other_bytes_are_not_measured():
    peers.require_same(["a", "a", "a"])
    with pytest.raises(RuntimeError, match="1 of 2 receivers"):
        peers.require_same(["a", "b", "a"])


@pytest.mark.parametrize("nbytes", [8_000_000, 64_000_000, 400_000_000])
def test_the_weights_are_as_large_as_asked_and_as_many_as_the_model_has(nbytes: int):
    shapes = payload.shapes(nbytes)
    assert len(shapes) == 11 * 36 + 2
    assert sum(2 * math.prod(shape) for shape in shapes.values()) == pytest.approx(nbytes, rel=0.25)
    assert len(payload.shapes(nbytes, payload.MANY_LAYERS)) == 1520


def test_versions_are_known_apart_by_their_stamps_and_single_bits_by_their_digest():
    weights = payload.Payload(MEGABYTES * 1_000_000, 4)
    weights.stamp(7)
    assert payload.stamps(weights.tensors) == {7}
    before = payload.digest(weights.tensors)
    payload.bits(weights.tensors["model.norm.weight"])[-1] ^= 1
    assert payload.digest(weights.tensors) != before
    payload.bits(weights.tensors["model.norm.weight"])[0] = 8
    assert payload.stamps(weights.tensors) == {7, 8}


@pytest.mark.parametrize(("how", "ranks"), [("whole", 1), ("tp2", 2), ("tp4", 4), ("pp2", 2)])
@pytest.mark.parametrize("fused", [False, True])
def test_the_ranks_of_a_cut_have_every_element(how: str, ranks: int, fused: bool):
    weights = payload.Payload(MEGABYTES * 1_000_000, 4)
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.tensors.items()}
    found = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    for rank in range(ranks):
        parts = shards.cut(shapes, how, rank, fused=fused)
        local = shards.build(weights.tensors, parts)
        for name, pieces in parts.items():
            assert tuple(local[name].shape) == shards.local_shape(pieces)
            for piece in pieces:
                there, here = (
                    tuple(slice(at, at + length) for at, length in zip(start, piece.extent, strict=True))
                    for start in (piece.start, piece.at)
                )
                found[piece.source][there] = local[name][here]
    assert payload.digest(found) == payload.digest(weights.tensors)


def test_fused_tensors_are_the_parts_one_behind_another():
    weights = payload.Payload(MEGABYTES * 1_000_000, 4).tensors
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    local = shards.build(weights, shards.cut(shapes, "tp2", 1, fused=True))
    prefix = "model.layers.1.self_attn"
    halves = [weights[f"{prefix}.{kind}_proj.weight"].chunk(2)[1] for kind in "qkv"]
    assert torch.equal(payload.bits(local[f"{prefix}.qkv_proj.weight"]), payload.bits(torch.cat(halves)))
    assert f"{prefix}.q_proj.weight" not in local


def test_what_leaves_through_a_port_is_counted_by_the_kernel():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        counted = socket_bytes.SentBytes(listener.getsockname()[1])
        assert counted.read() == 0
        with socket.create_connection(listener.getsockname()) as reader:
            accepted, _ = listener.accept()
            sending = threading.Thread(target=accepted.sendall, args=(bytes(1_000_000),))
            sending.start()
            got = 0
            while got < 1_000_000:
                got += len(reader.recv(1 << 16))
            sending.join()
            reader.sendall(b"the other way does not count")
            assert counted.read() == 1_000_000
            accepted.close()
        assert counted.read() == 1_000_000  # also when it has ended


def test_hashes_are_measured_where_they_are_made(monkeypatch):
    for name in ("xxh3_64_intdigest", "xxh3_64"):  # put back afterwards
        monkeypatch.setattr(xxhash, name, getattr(xxhash, name))
    clock = itertools.count()  # every hash lasts one second by it
    monkeypatch.setattr(verifying, "time", types.SimpleNamespace(thread_time=lambda: next(clock)))
    expected = xxhash.xxh3_64_intdigest(b"chunk")
    measured = verifying.Verifying()
    assert measured.seconds == 0
    assert xxhash.xxh3_64_intdigest(b"chunk") == expected
    assert measured.seconds == 1
    assert xxhash.xxh3_64_intdigest(b"chunk", seed=3) != expected
    assert measured.seconds == 2
    digest = xxhash.xxh3_64()
    digest.update(b"chu")
    digest.update(b"nk")
    assert digest.intdigest() == expected
    assert measured.seconds == 4
    with pytest.raises(TypeError):
        xxhash.xxh3_64_intdigest("not bytes")  # pyright: ignore[reportArgumentType] - that is the point
    assert measured.seconds == 5  # a hash that fails is measured as well


def test_hashes_are_measured_by_the_cpu_of_their_thread(monkeypatch):
    monkeypatch.setattr(xxhash, "xxh3_64_intdigest", xxhash.xxh3_64_intdigest)
    monkeypatch.setattr(xxhash, "xxh3_64", xxhash.xxh3_64)
    measured = verifying.Verifying()
    begun = time.thread_time()
    xxhash.xxh3_64_intdigest(bytes(1_000_000))
    assert 0 < measured.seconds <= time.thread_time() - begun


def test_a_step_changes_as_much_of_the_weights_as_the_goal_says():
    drift = delta.Drift(1 << 20)
    before = drift.bytes().view("int16")
    drift.step()
    assert 0.01 < (drift.bytes().view("int16") != before).mean() <= 0.015
