"""Videos: every way people hand one over, what its header says, and the frames that are wanted of it.

Accepted: what `omni_processor.encoded` reads (any container PyAV opens), a list of frames (each an image
source), a numpy array [frames, height, width, 3] or torch tensor [frames, 3, height, width] of bytes, and
``{"frames": ..., "fps": ...}``. Frames that come without a rate count as sampled already: at the model's own.

Frames given one by one are written as a lossless video, and it is that which is decoded: whoever is given the
item's file sees what the trainer sees.
"""

from __future__ import annotations

import hashlib
import io
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np

from omni_processor import cancellation, images, sources
from omni_processor.containers import opened
from omni_processor.encoded import Encoded, Reading
from omni_processor.errors import Empty, SourceNotAllowed, TooLarge, Undecodable
from omni_processor.sample import Limits

if TYPE_CHECKING:
    from av import Packet
    from av.container import InputContainer
    from av.video.stream import VideoStream


SLOWEST, FASTEST = 0.001, 1000.0
"""Frames a second of what comes frame by frame; containers keep such rates exactly enough."""


@dataclass(frozen=True, slots=True)
class Clip:
    """What is made into an item.

    Attributes:
        frames: those that are shown, each uint8 [height, width, 3], decoded one by one as they are taken:
            together, unscaled, they may be more than memory holds.
        fps: stored frames a second.
        sound: its own, mono float32 [samples] at the model's rate; None where it is not wanted.
    """

    frames: Iterable[np.ndarray]
    fps: float
    sound: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class VideoHeader:
    """What is known before decoding.

    Attributes:
        height, width: of a frame in pixels, upright.
        frames: how many there are, counted.
        fps: of them in a second, on average.
        sounds: whether it has a sound track.
    """

    height: int
    width: int
    frames: int
    fps: float
    sounds: bool

    @property
    def seconds(self) -> float:
        """How long it is."""
        return self.frames / self.fps


def resolve(source: Any, limits: Limits, fps: float, item: str = "video") -> Encoded:
    """Bring any accepted source to the bytes of a video file; only lists of frames are encoded for that.

    Args:
        source: see the module.
        limits: of bytes, frames and pixels.
        fps: of frames that come without a rate.
        item: which item of the sample, for messages.

    Raises:
        SourceNotAllowed, Undecodable, TooLarge, Empty: as `omni_processor.encoded` does; Undecodable also for
            frames that are none or differ in size.
    """
    reading = Reading(item, "a video", limits.max_stream_bytes, "max_stream_bytes")
    encoded = reading.read(source)
    if encoded is not None:
        return encoded
    if isinstance(source, Mapping):
        if source.get("frames") is None:
            return reading.cell(source)
        told = source.get("fps")
        if told is not None:
            number = isinstance(told, int | float | np.number) and not isinstance(told, bool)
            if not number or not SLOWEST <= told <= FASTEST:
                raise Undecodable(
                    f"fps is {told!r:.40}; frames a second were expected, {SLOWEST:g} to {FASTEST:g}",
                    item=item,
                )
            fps = float(told)
        source = source["frames"]
    count = _counted(source, limits, item)
    data = write_lossless(_frames(source, limits, item), fps, limits, item)
    return reading.encoded(data, f"{count} frames")


def read_header(encoded: Encoded, limits: Limits, item: str = "video") -> VideoHeader:
    """Size, rate and number of frames; packets are counted, nothing is decoded.

    Raises:
        Undecodable: no video in a container read here, or a damaged header.
        Empty: no video track, or one without frames.
        TooLarge: more pixels, frames or seconds than `limits` allow.
    """
    with opened(encoded, item, "a video") as container:
        stream = _track(container, encoded, item)
        height, width = stream.height, stream.width
        if height * width > limits.max_pixels:
            raise TooLarge(
                f"frames of {width} x {height} pixels, the limit is {limits.max_pixels}: shrink them or "
                "raise Limits(max_pixels=...)",
                item=item,
                source=encoded.label,
            )
        rate = stream.average_rate
        count, discarded, first, last = 0, 0, None, None
        for packet in container.demux(stream):
            cancellation.check()
            if packet.size and (packet.is_discard or _is_hidden(packet)):
                discarded += 1  # an edit list leaves it out, or other frames only refer to it
            elif packet.size:
                count += 1
                if packet.pts is not None and packet.time_base is not None:
                    moment = packet.pts * packet.time_base
                    first = moment if first is None else min(first, moment)
                    last = moment if last is None else max(last, moment)
            if count > limits.max_frames:
                raise TooLarge(
                    f"more than {limits.max_frames} frames: cut it or raise Limits(max_frames=...)",
                    item=item,
                    source=encoded.label,
                )
        if not count:
            raise Empty("the video has no frames", item=item, source=encoded.label)
        if not rate and first is not None and last is not None and last > first:
            rate = Fraction(count - 1) / (last - first)
        if not rate:
            raise Undecodable("the video does not say its frame rate", item=item, source=encoded.label)
        if count + discarded < stream.frames:
            raise Undecodable(
                f"the video is cut off: {count + discarded} of {stream.frames} frames are there",
                item=item,
                source=encoded.label,
            )
        sounds = bool(container.streams.audio)
    turned = _quarter_turns(encoded, item) % 2
    header = VideoHeader(*((width, height) if turned else (height, width)), count, float(rate), sounds)
    if header.seconds > limits.max_seconds:
        raise TooLarge(
            f"{header.seconds:.1f} s long, the limit is {limits.max_seconds:g} s: cut it or raise "
            "Limits(max_seconds=...)",
            item=item,
            source=encoded.label,
        )
    return header


def decode(
    encoded: Encoded, header: VideoHeader, wanted: Sequence[int], item: str = "video"
) -> Iterator[np.ndarray]:
    """Frames as a person sees them, upright, each uint8 [height, width, 3].

    Args:
        encoded: the file.
        header: what `read_header` said of it.
        wanted: numbers of the frames in the order in which they are shown, ascending; one may come twice.
        item: which item of the sample, for messages.

    Raises:
        Undecodable: damaged data, or fewer frames than its packets promise.
    """
    place = number = 0
    with opened(encoded, item, "a video") as container:
        stream = _track(container, encoded, item)
        for frame in container.decode(stream):
            cancellation.check()
            if place == len(wanted):
                break
            if frame.is_corrupt:
                raise Undecodable(
                    f"the video is damaged at frame {number} of {header.frames}",
                    item=item,
                    source=encoded.label,
                )
            if number == wanted[place]:
                pixels = np.rot90(frame.to_ndarray(format="rgb24"), frame.rotation // 90)
                if pixels.shape != (header.height, header.width, 3):
                    raise Undecodable(
                        f"the header promises frames of {header.width} x {header.height} pixels, frame "
                        f"{number} has {pixels.shape[1]} x {pixels.shape[0]}",
                        item=item,
                        source=encoded.label,
                    )
                while place < len(wanted) and number == wanted[place]:
                    yield pixels
                    place += 1
            number += 1
    if place < len(wanted):
        raise Undecodable(
            f"the video is cut off: {number} of {header.frames} frames could be decoded",
            item=item,
            source=encoded.label,
        )


def write_lossless(frames: Iterable[np.ndarray], fps: float, limits: Limits, item: str) -> bytes:
    """Frames, each uint8 [height, width, 3], as an MP4 of FFV1, of which they can be had back bit for bit.

    The same frames give the same bytes.

    Args:
        frames: one at least.
        fps: of them, between `SLOWEST` and `FASTEST`.
        limits: of bytes; held while they are written.
        item: which item of the sample, for messages.

    Raises:
        Undecodable: they differ in size, or no video can have it.
        TooLarge: they come to more bytes than allowed.
    """
    import av
    from av.error import FFmpegError

    target, size = io.BytesIO(), None
    with av.open(target, "w", format="mp4") as container:
        stream = container.add_stream("ffv1", rate=Fraction(fps).limit_denominator(1001))
        stream.pix_fmt = "bgr0"
        for frame in frames:
            cancellation.check()
            if size is None:
                size = stream.height, stream.width = frame.shape[:2]
            if frame.shape[:2] != size:
                raise Undecodable(
                    f"its frames have different sizes, {size[1]} x {size[0]} and {frame.shape[1]} x "
                    f"{frame.shape[0]}: bring them to one",
                    item=item,
                )
            try:
                container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
            except (FFmpegError, ValueError) as error:
                raise Undecodable(
                    f"frames of {size[1]} x {size[0]} pixels cannot be a video: {error}", item=item
                ) from error
            if target.tell() > limits.max_stream_bytes:
                raise TooLarge(
                    f"written losslessly its frames take more than {limits.max_stream_bytes} bytes: take "
                    "fewer or smaller ones, pass a file, or raise Limits(max_stream_bytes=...)",
                    item=item,
                )
        container.mux(stream.encode(None))
    return target.getvalue()


def digest(encoded: Encoded) -> bytes:
    """A 16-byte hash of the file."""
    return hashlib.blake2b(encoded.data, digest_size=16).digest()


def _is_hidden(packet: Packet) -> bool:
    """Whether a packet holds a frame that is never shown; of other codecs they lie beside one that is."""
    if packet.stream.codec_context.name not in ("vp8", "libvpx"):
        return False
    return not bytes(packet)[0] & 0x10  # show_frame (RFC 6386, section 9.1)


def _track(container: InputContainer, encoded: Encoded, item: str) -> VideoStream:
    pictures = [
        stream
        for stream in container.streams.video
        if not stream.disposition & type(stream.disposition).attached_pic
    ]
    if not pictures:
        raise Empty("it has no video track", item=item, source=encoded.label)
    stream = pictures[0]
    if stream.codec_context is None or not stream.height or not stream.width:
        raise Undecodable(
            "the video is of an unknown codec, or its header says no size", item=item, source=encoded.label
        )
    stream.codec_context.thread_count = 1  # what damaged data decode to must not depend on threads
    return stream


def _quarter_turns(encoded: Encoded, item: str) -> int:
    """How often frames are turned by 90 degrees to be upright; only a frame says so."""
    with opened(encoded, item, "a video") as container:
        frame = next(iter(container.decode(_track(container, encoded, item))), None)
        return 0 if frame is None else frame.rotation // 90


def _counted(source: Any, limits: Limits, item: str) -> int:
    """How many frames are given one by one. Raises: as `resolve`."""
    torch = type(source).__module__.partition(".")[0] == "torch"
    if isinstance(source, np.ndarray) or torch:
        shape: Sequence[int] = source.shape
        channels = 3 if isinstance(source, np.ndarray) else 1
        if len(shape) != 4 or shape[channels] != 3 or not str(source.dtype).endswith("uint8"):
            raise Undecodable(
                "frames as an array are uint8 [frames, height, width, 3] (torch: channels before height), "
                f"not {source.dtype} {list(shape)}",
                item=item,
            )
        count = int(shape[0])
        pixels = math.prod(int(side) for place, side in enumerate(shape) if place not in (0, channels))
        if count and not pixels:
            raise Empty("the frames have no pixels", item=item)
    elif isinstance(source, Sequence) and not isinstance(source, str | bytes | bytearray):
        count, pixels = len(source), 0
    else:
        raise SourceNotAllowed(
            f"cannot read a video from {type(source).__name__}: pass a path, file:// or data URL, bytes, a "
            'list of frames, {"frames": ..., "fps": ...} or {"bytes": ..., "path": ...}',
            item=item,
        )
    if not count:
        raise Empty("the list of frames is empty", item=item)
    if count > limits.max_frames or pixels > limits.max_pixels:
        raise TooLarge(
            f"{count} frames of {pixels} pixels, the limits are {limits.max_frames} and {limits.max_pixels}: "
            "take fewer or smaller ones, or raise Limits(max_frames=..., max_pixels=...)",
            item=item,
        )
    return count


def _frames(source: Any, limits: Limits, item: str) -> Iterator[np.ndarray]:
    """The frames of what `_counted` let pass, each uint8 [height, width, 3]."""
    for number, frame in enumerate(source):
        if isinstance(source, np.ndarray):
            yield np.ascontiguousarray(frame)
        elif type(source).__module__.partition(".")[0] == "torch":
            yield np.ascontiguousarray(frame.detach().cpu().numpy().transpose(1, 2, 0))
        else:
            label = f"{item} frame {number}"
            resolved = sources.resolve(frame, limits, label)
            yield np.asarray(images.decode(resolved, images.read_header(resolved, limits, label), label))
