"""Publishers and subscribers in processes of their own, for the tests that kill one.

Run as `member_process.py FD`, where FD is a Unix socket: for each JSON list of arguments that comes with a
descriptor it forks a child, which talks over that descriptor, and answers the child's process id. Importing
torch once is enough.

    ["subscriber", ADDRESS, NAME, FLOATS]   says "ready", then "VERSION HASH" for each version it took
    ["plain", ADDRESS, NAME, FLOATS, OPTIONS] the same with a model of one tensor, and options in JSON
    ["publisher", ADDRESS, FLOATS]          says "ready EPOCH"; publishes each version whose number it hears,
                                            and says "published VERSION EPOCH"
    ["engine", ADDRESS, NAME, FLOATS, OPTIONS, HOW]  says "ready", and of each version it has taken
                                            "took VERSION DIGEST WIRE FROM_RANKS FROM_PEERS"
    ["trainer", ADDRESS, FLOATS, OPTIONS, HOW]       says "ready EPOCH"; hears "publish VERSION", and says
                                            "published VERSION EPOCH", or "failed ERROR"

    ["coordinator", HOST, OPTIONS]                   says "ready ADDRESS"; stays until the test hangs up

OPTIONS, in JSON, are those of `Subscriber`, `Publisher` and `Coordinator`; `tls` is a list of files. HOW too:

    halt: [VERSION, SHARE]  stop (SIGSTOP) and say "halted" when so much of it has come, or been sent
    crawl: [VERSION, SECONDS]  wait this long after every chunk of this version and later ones, until "hurry"
                            is heard
    hold: true              keep each version until "ack" is heard

Both hear "census" too, and say "census DESCRIPTORS THREADS ARENAS SOCKETS"; an engine hears "health", and
says "health COORDINATOR PUBLISHER ANNOUNCED ERROR", and with a version "check", and says "is DIGEST".
"""

import json
import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import dcs
import torch
import xxhash
from dcs.wire.incoming import Progress
from dcs.wire.server import ChunkServer
from dcs.wire.transfer import Transfer


def model(floats: int, version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    half = floats // 2
    return {
        "a": torch.randn(half, generator=generator),
        "b": torch.randn(floats - half, generator=generator).to(torch.bfloat16),
    }


def digest(tensors: dict[str, torch.Tensor]) -> str:
    state = xxhash.xxh3_64()
    for name in sorted(tensors):
        state.update(tensors[name].contiguous().reshape(-1).view(torch.uint8).numpy())
    return state.hexdigest()


def subscribe(connection: socket.socket, address: str, name: str, tensors: dict, **options) -> None:
    layout = dcs.layout.of(tensors)
    with dcs.Subscriber(address, run="r", name=name, layout=layout, **options) as subscriber:
        connection.sendall(b"ready\n")
        version = -1
        while (staged := subscriber.next(after=version, timeout=120)) is not None:
            version = staged.version
            line = f"{version} {digest(staged.tensors)}\n"
            staged.ack()
            connection.sendall(line.encode())


def publish(connection: socket.socket, address: str, floats: int) -> None:
    layout = dcs.layout.of(model(floats, 0))
    with dcs.Publisher(address, run="r", layout=layout) as publisher:
        connection.sendall(f"ready {publisher.epoch}\n".encode())
        for line in connection.makefile("r"):
            publisher.publish(int(line), model(floats, int(line)))
            connection.sendall(f"published {int(line)} {publisher.epoch}\n".encode())


class Talk:
    """Lines to and from the test, from any thread."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def say(self, *words: object) -> None:
        with self._lock:
            self._connection.sendall((" ".join(map(str, words)) + "\n").encode())

    def hear(self, answers: dict[str, Callable[..., None]]) -> None:
        """Answer everything until the test hangs up."""
        for line in self._connection.makefile("r"):
            word, *rest = line.split()
            answer: Callable[..., None] = answers[word]
            answer(*rest)

    def census(self) -> None:
        """What this process has open, besides what it began with."""
        links, arenas = [], set()
        for number in os.listdir("/proc/self/fd"):
            try:
                links.append(os.readlink(f"/proc/self/fd/{number}"))
                if "memfd:dcs" in links[-1]:
                    arenas.add(os.stat(f"/proc/self/fd/{number}").st_ino)
            except FileNotFoundError:
                continue  # the descriptor of this listing itself
        names = sum(
            line.split()[-1].startswith(f"@dcs-{os.getpid()}-")
            for line in Path("/proc/net/unix").read_text().splitlines()
        )
        self.say("census", len(links), threading.active_count(), len(arenas), names)

    def halt(self, *words: object) -> None:
        self.say("halted", *words)
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # at once: not when some thread wakes


def watch_landing(talk: Talk, how: dict) -> threading.Event:
    """Halts and crawls as told; the event ends the crawling."""
    hurry, halted, land = threading.Event(), threading.Event(), Transfer.land

    def landing(self: Transfer, progress: Progress, index: int, value: int) -> None:
        land(self, progress, index, value)
        copy = self.copy
        if "crawl" in how and copy.version >= how["crawl"][0]:
            hurry.wait(how["crawl"][1])
        watched, share = how.get("halt", (-1, 0.0))
        far = copy.version == watched and copy.remaining <= (1 - share) * copy.arena.nbytes
        if far and not halted.is_set():
            halted.set()
            talk.halt(copy.arena.nbytes - copy.remaining)

    Transfer.land = landing
    return hurry


def watch_sending(talk: Talk, share: float) -> Callable[[int, int], None]:
    """Halts when this share of what is published has been sent; returns what has to be told of a publish."""
    halted, count = threading.Event(), ChunkServer.count
    limit = [float("inf")]

    def counting(self: ChunkServer, nbytes: int) -> None:
        count(self, nbytes)
        if self.sent >= limit[0] and not halted.is_set():
            halted.set()
            talk.halt(self.sent)

    def publishing(sent: int, nbytes: int) -> None:
        limit[0] = sent + max(1, int(share * nbytes))

    ChunkServer.count = counting
    return publishing


def engine(
    connection: socket.socket, address: str, name: str, tensors: dict, options: dict, how: dict
) -> None:
    talk, orders = Talk(connection), queue.Queue[str]()
    hurry = watch_landing(talk, how)
    layout = dcs.layout.of(tensors)
    options.setdefault("run", "r")
    with dcs.Subscriber(address, name=name, layout=layout, **options) as subscriber:

        def health() -> None:
            known = subscriber.health()
            error = type(known.error).__name__
            talk.say("health", known.coordinator, known.publisher, known.announced, error)

        answers = {
            "census": talk.census,
            "health": health,
            "hurry": hurry.set,
            "ack": lambda: orders.put("ack"),
            "check": lambda: orders.put("check"),
        }
        threading.Thread(target=talk.hear, args=(answers,), daemon=True).start()
        talk.say("ready")
        version = -1
        while True:
            try:
                staged = subscriber.next(after=version, timeout=120)
            except dcs.DcsError as error:
                talk.say("failed", type(error).__name__)
                return
            if staged is None:
                return
            version = staged.version
            talk.say(
                "took", version, digest(staged.tensors), staged.wire, staged.from_ranks, staged.from_peers
            )
            while how.get("hold") and orders.get() == "check":
                talk.say("is", digest(staged.tensors))
            staged.ack()


def trainer(connection: socket.socket, address: str, floats: int, options: dict, how: dict) -> None:
    talk, layout = Talk(connection), dcs.layout.of(model(floats, 0))
    watched, share = how.get("halt", (-1, 0.0))
    publishing = watch_sending(talk, share) if "halt" in how else None
    options.setdefault("run", "r")
    with dcs.Publisher(address, layout=layout, **options) as publisher:

        def publish(version: str) -> None:
            number = int(version)
            if publishing is not None and number == watched:
                publishing(publisher.sent, publisher.layout.offsets()[1])
            try:
                publisher.publish(number, model(floats, number))
            except dcs.DcsError as error:
                talk.say("failed", type(error).__name__)
            else:
                talk.say("published", number, publisher.epoch)

        talk.say("ready", publisher.epoch)
        talk.hear(
            {"publish": publish, "census": talk.census, "sent": lambda: talk.say("sent", publisher.sent)}
        )


def coordinate(connection: socket.socket, host: str, options: dict) -> None:
    talk = Talk(connection)
    with dcs.Coordinator(host, **options) as coordinator:
        talk.say("ready", coordinator.address)
        talk.hear({})


def with_tls(options: dict) -> dict:
    """The same with certificates for file names."""
    return options | ({"tls": dcs.Tls(*options["tls"])} if "tls" in options else {})


def serve(requests: socket.socket) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are reaped by themselves
    while True:
        request, descriptors, _, _ = socket.recv_fds(requests, 4096, 1)
        if not request:
            return
        pid = os.fork()
        if pid:
            os.close(descriptors[0])
            requests.sendall(str(pid).encode())
            continue
        requests.close()
        with socket.socket(fileno=descriptors[0]) as connection:
            role, address, *rest = json.loads(request)
            if role == "subscriber":
                subscribe(connection, address, rest[0], model(int(rest[1]), 0))
            elif role == "plain":
                tensors = {"a": torch.zeros(int(rest[1]))}
                subscribe(connection, address, rest[0], tensors, **json.loads(rest[2]))
            elif role == "coordinator":
                coordinate(connection, address, json.loads(rest[0]))
            elif role == "engine":
                tensors = model(int(rest[1]), 0)
                options = with_tls(json.loads(rest[2]))
                engine(connection, address, rest[0], tensors, options, json.loads(rest[3]))
            elif role == "trainer":
                options = with_tls(json.loads(rest[1]))
                trainer(connection, address, int(rest[0]), options, json.loads(rest[2]))
            else:
                publish(connection, address, int(rest[0]))
        return


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(socket.socket(fileno=int(sys.argv[1])))
