"""Random kills of every kind of process while samples go through, with an exact account at the end."""

import random
import subprocess
import sys
import time
from collections import Counter, deque
from pathlib import Path

import pytest
import transferqueue as tq

# A worker appends a line before it asks for something and one after it was answered, so that what is known to
# be done, and what may or may not be, can be read from its file when it was killed.
WORKER = """
import os, sys, numpy as np, transferqueue as tq

kind, name, address, transport, log = sys.argv[1:]
out = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
say = lambda *words: os.write(out, (" ".join(map(str, words)) + "\\n").encode())
queue = tq.connect(address, transport=transport, reconnect_seconds=90, timeout=90)
part = queue.partition("p")

def produce():
    number = 0
    generator = np.random.default_rng(abs(hash(name)) % 2**32)
    while not os.path.exists(log + ".stop"):
        number += 1
        rows = int(generator.integers(1, 5))
        keys = [f"{name}/{number}/{row}/{rows}" for row in range(rows)]
        size = int(generator.choice([10, 1000, 100_000]))
        say("try", *keys)
        ids = part.put({"key": keys, "data": [np.full(size, number % 251, np.uint8)] * rows}, timeout=90)
        say("put", *(f"{key}={sample}" for key, sample in zip(keys, ids.tolist())))
        part.update(ids, {"length": np.full(rows, size)}, timeout=90)
        say("updated", *ids.tolist())

def consume():
    while True:
        try:
            batch = part.fetch("t", 3, at_least=1, timeout=90, lease_seconds=6.0)
        except tq.Timeout:
            continue
        except tq.Closed:
            say("end")
            return
        ids = batch.ids.tolist()
        for sample, key, data, size in zip(ids, batch["key"], batch["data"], batch["length"]):
            number = int(key.split("/")[1])
            data = np.asarray(data)
            if len(data) != int(size) or not (data == number % 251).all():
                say("wrong", sample, key, len(data), size, set(data.tolist()))
            say("got", f"{key}={sample}")
        say("acking", *ids)
        try:
            batch.ack(timeout=90)
        except tq.StaleLease:
            say("stale", *ids)
        else:
            say("acked", *ids)

try:
    produce() if kind == "producer" else consume()
except tq.QueueError as error:
    say("failed", type(error).__name__, str(error))
    raise
"""


class Workers:
    """The clients of a soak: when one is killed another takes its place."""

    def __init__(self, folder: Path, address: str) -> None:
        self.folder = folder
        self.address = address
        self.running: dict[str, tuple[str, subprocess.Popen[bytes]]] = {}
        self.count = 0

    def start(self, kind: str, transport: str) -> None:
        self.count += 1
        name = f"{kind}{self.count}"
        command = [sys.executable, "-c", WORKER, kind, name, self.address, transport, str(self.log(name))]
        self.running[name] = (transport, subprocess.Popen(command))

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def of(self, kind: str) -> list[str]:
        return [name for name in self.running if name.startswith(kind)]

    def kill(self, name: str) -> None:
        transport, process = self.running.pop(name)
        process.kill()
        process.wait(20)
        self.start(name.rstrip("0123456789"), transport)

    def wait(self, kind: str) -> None:
        for name in self.of(kind):
            _, process = self.running[name]
            assert process.wait(240) == 0, self.log(name).read_text()[-500:]

    def lines(self, word: str) -> list[list[str]]:
        found: list[list[str]] = []
        for path in sorted(self.folder.glob("*.log")):
            for line in path.read_text().splitlines():
                first, *rest = line.split()
                if first == word:
                    found.append(rest)
        return found

    def until_acked(self, batches: int) -> None:
        deadline = time.monotonic() + 120
        while len(self.lines("acked")) < batches:
            assert time.monotonic() < deadline, "nothing goes through any more"
            time.sleep(0.2)

    def close(self) -> None:
        for _, process in self.running.values():
            process.kill()
            process.wait(20)


def soak(folder: Path, kills: int, seed: int) -> Counter[str]:
    """Runs it; returns how many of each kind were killed."""
    choose = random.Random(seed)
    done: Counter[str] = Counter()
    deaths: dict[int, deque[float]] = {part: deque(maxlen=4) for part in range(3)}
    with tq.serve(2, journal=folder / "journal") as server, tq.connect(server, reconnect_seconds=90) as queue:
        part = queue.partition("p", tasks={"t": ["key", "data", "length"]}, max_samples=400)
        workers = Workers(folder, server.address)
        try:
            for kind in ("producer", "consumer"):
                for transport in ("shm", "zmq"):
                    workers.start(kind, transport)
            workers.until_acked(3)
            while sum(done.values()) < kills:
                assert server.failure is None
                time.sleep(choose.uniform(0.05, 0.9))  # the moments of the kills are what is drawn
                kind = choose.choices(["controller", "unit", "producer", "consumer"], [5, 2, 2, 2])[0]
                if kind in ("producer", "consumer"):
                    workers.kill(choose.choice(workers.of(kind)))
                else:
                    which = 0 if kind == "controller" else choose.choice([1, 2])
                    died = deaths[which]
                    if len(died) == 4 and time.monotonic() - died[0] < 10.5:
                        continue  # one more would be a crash loop
                    died.append(time.monotonic())
                    server.processes[which].kill()
                done[kind] += 1
            workers.until_acked(len(workers.lines("acked")) + 3)
            for name in workers.of("producer"):
                (folder / f"{name}.log.stop").touch()
            workers.wait("producer")
            drop_unfinished(part)
            part.close(timeout=90)
            workers.start("consumer", "shm")
            workers.wait("consumer")
            assert server.failure is None
            account(workers, part.ledger("t", timeout=90))
            return done
        finally:
            workers.close()


def drop_unfinished(part: tq.Partition) -> None:
    """Ends samples whose producer was killed before it updated them: nobody would ever get them."""
    for sample in part.ledger("t", timeout=90).pending:
        try:
            part.get([sample], ["length"], timeout=90)
        except tq.FieldNotReady:
            part.drop([sample], "its producer is gone", timeout=90)
        except tq.UnknownSample:
            continue  # acked meanwhile


def account(workers: Workers, ledger: tq.Ledger) -> None:
    """Every acknowledged put was delivered and acked once; every other is wholly there or not at all."""
    assert workers.lines("wrong") == []
    assert workers.lines("failed") == []
    put = dict(pair.split("=") for line in workers.lines("put") for pair in line)
    tried = [keys for keys in workers.lines("try")]
    got: dict[str, set[str]] = {}
    for [pair] in workers.lines("got"):
        key, sample = pair.split("=")
        got.setdefault(key, set()).add(sample)
    updated = {sample for line in workers.lines("updated") for sample in line}
    assert len(put) > 0
    assert all(len(samples) == 1 for samples in got.values()), "a put has had two effects"
    assert all(put.get(key, sample) == sample for key, [sample] in got.items())
    acked = [sample for line in workers.lines("acked") for sample in line]
    assert max(Counter(acked).values()) == 1, "a sample was acked twice"
    in_ledger = {str(sample) for sample in ledger.acked}
    assert set(acked) <= in_ledger
    assert in_ledger <= set(acked) | {sample for line in workers.lines("acking") for sample in line}
    assert not ledger.leased
    assert not ledger.pending
    # All that was acknowledged is done, but for what its producer never updated.
    unfinished = {str(sample) for sample in ledger.dropped}
    assert in_ledger >= updated
    assert set(put.values()) <= in_ledger | unfinished
    unacknowledged = [keys for keys in tried if keys[0] not in put]
    known = in_ledger | unfinished
    extra = len(known) - len(put)
    assert 0 <= extra <= sum(map(len, unacknowledged))
    assert all(len(got.keys() & set(keys)) in (0, len(keys)) for keys in unacknowledged)


def check_deaths(caplog: pytest.LogCaptureFixture) -> None:
    """No process of the store has ended but by a kill."""
    ends = [message for message in caplog.messages if "ended with status" in message]
    assert ends
    assert all("ended with status -9" in message for message in ends), ends


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_random_kills_lose_nothing_and_repeat_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    soak(tmp_path, kills=6, seed=1)
    check_deaths(caplog)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_soak_of_200_random_kills(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    began = time.monotonic()
    done = soak(tmp_path, kills=200, seed=2)
    print(f"{dict(done)} in {time.monotonic() - began:.0f} s")
    assert sum(done.values()) == 200
    check_deaths(caplog)
