"""The subscriber's end: one connection to a publisher, over which versions are pulled and verified."""

import socket
from collections import Counter
from dataclasses import dataclass, field

from dcs import manifest as manifests
from dcs.control.messages import Announcement, Endpoint
from dcs.errors import CorruptChunk, ProtocolError, from_refusal
from dcs.manifest import Manifest, Placement
from dcs.memory.arena import Arena
from dcs.memory.snapshots import Superseded
from dcs.wire import frames

_CONNECT_SECONDS = 5.0
_STALL_SECONDS = 10.0  # without a single byte from the publisher
_ATTEMPTS = 4  # for one chunk whose bytes do not match its hash


@dataclass
class Progress:
    """What a slot holds of the version being pulled; survives a lost connection.

    Attributes:
        target: the version this is about.
        manifest: None until it has arrived and agreed with the announced root.
        have: one byte a chunk, 1 once its bytes are there and match their hash.
        corrupt: how often each chunk's bytes did not match (-1: the manifest's).
        received: payload bytes taken off the wire, retries included.
    """

    target: Announcement
    manifest: Manifest | None = None
    have: bytearray = field(default_factory=bytearray)
    corrupt: Counter[int] = field(default_factory=Counter)
    received: int = 0


class ChunkClient:
    """A connection to a publisher. Connects, or raises `OSError`; call `greet` before `pull`."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._sock = socket.create_connection((endpoint.host, endpoint.port), _CONNECT_SECONDS)

    def greet(self, hello: frames.Hello) -> None:
        """Say hello; raises what it is refused with, `ProtocolError`, or `OSError`."""
        frames.set_deadlines(self._sock, frames.HELLO_SECONDS)
        frames.send_hello(self._sock, hello)
        sender = f"the publisher at {self.endpoint.host}:{self.endpoint.port}"
        answer = frames.receive_hello(self._sock, sender)
        if isinstance(answer, frames.Refusal):
            raise from_refusal(answer.code, answer.message, {})
        if not isinstance(answer, frames.Welcome):
            raise ProtocolError(f"{sender} answered a hello with a hello")
        frames.set_deadlines(self._sock, _STALL_SECONDS)

    def pull(self, progress: Progress, arena: Arena, placement: Placement) -> None:
        """Bring what `progress` still misses into `arena`, verified.

        Raises `Superseded` when the publisher no longer holds the version, `CorruptChunk` when bytes keep
        failing their hash, and `OSError` or `ProtocolError` when the connection is of no more use: connect
        anew and call again with the same progress.
        """
        target = progress.target
        request = frames.REQUEST.pack(frames.MANIFEST, target.epoch, target.version, 0, 0)
        fresh = progress.manifest is None
        if fresh:  # ask for everything in the same breath: one round trip
            request += frames.REQUEST.pack(frames.CHUNKS, target.epoch, target.version, 0, frames.TO_THE_END)
        self._sock.sendall(request)
        progress.manifest = manifest = self._receive_manifest(progress, placement, fresh)
        chunks = len(manifest.chunks)
        if fresh:
            progress.have = bytearray(chunks)
            self._receive_chunks(progress, manifest, arena, range(chunks))
        while (first := progress.have.find(0)) >= 0:
            end = progress.have.find(1, first)
            run = range(first, chunks if end < 0 else end)
            self._sock.sendall(
                frames.REQUEST.pack(frames.CHUNKS, target.epoch, target.version, first, len(run))
            )
            self._receive_chunks(progress, manifest, arena, run)
        self._sock.sendall(frames.REQUEST.pack(frames.DONE, target.epoch, target.version, 0, 0))

    def _receive_manifest(self, progress: Progress, placement: Placement, fresh: bool) -> Manifest:
        target = progress.target
        status, _, length = frames.REPLY.unpack(frames.receive(self._sock, frames.REPLY.size))
        if status == frames.SUPERSEDED:
            if fresh:
                frames.receive(self._sock, frames.REPLY.size)  # the same answer, about the chunks
            raise Superseded
        limit = placement.encoded_limit + len(target.run.encode())
        if status != frames.OK or length > limit:
            raise ProtocolError(
                f"asked for a manifest of at most {limit} bytes, got status {status} and {length} bytes"
            )
        try:
            manifest = manifests.decode(frames.receive(self._sock, length), placement, target.root)
            if (manifest.run, manifest.epoch, manifest.version) != (target.run, target.epoch, target.version):
                raise CorruptChunk(
                    f"the manifest names run {manifest.run!r} epoch {manifest.epoch} version"
                    f" {manifest.version},"
                    f" announced was {target.run!r} epoch {target.epoch} version {target.version}"
                )
        except CorruptChunk as error:
            progress.corrupt[-1] += 1
            if progress.corrupt[-1] >= _ATTEMPTS:
                raise
            raise ProtocolError(str(error)) from error
        return manifest

    def _receive_chunks(self, progress: Progress, manifest: Manifest, arena: Arena, run: range) -> None:
        for index in run:
            status, got, length = frames.REPLY.unpack(frames.receive(self._sock, frames.REPLY.size))
            if status == frames.SUPERSEDED:
                self._sock.sendall(frames.REQUEST.pack(frames.DONE, manifest.epoch, manifest.version, 0, 0))
                raise Superseded
            start, end = manifest.span(index)
            if status != frames.OK or got != index or length != end - start:
                raise ProtocolError(
                    f"asked for chunk {index} of {end - start} bytes, got status {status}, chunk {got} of"
                    f" {length}"
                )
            view = arena.memory[start:end]
            frames.receive_into(self._sock, view)
            progress.received += length
            if manifests.hash_chunk(view) == manifest.chunks[index]:
                progress.have[index] = 1
                continue
            progress.corrupt[index] += 1
            if progress.corrupt[index] >= _ATTEMPTS:
                raise CorruptChunk(
                    f"chunk {index} of version {manifest.version} of run {manifest.run!r} did not match its"
                    " hash"
                    f" {_ATTEMPTS} times; the publisher's buffer or the path to it is damaged"
                )

    def cut(self) -> None:
        """End the connection from another thread; a pull under way raises `OSError`."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # the peer was faster

    def close(self) -> None:
        """Close the socket; only by the thread that pulls."""
        self._sock.close()
