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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from omni_processor import images, sources
from omni_processor.containers import opened
from omni_processor.encoded import Encoded, Reading
from omni_processor.errors import Empty, SourceNotAllowed, TooLarge, Undecodable
from omni_processor.sample import Limits

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.video.stream import VideoStream


@dataclass(frozen=True, slots=True)
class Clip:
    """What is made into an item.

    Attributes:
        frames: those that are shown, uint8 [frames, height, width, 3].
        fps: stored frames a second.
        sound: its own, mono float32 [samples] at the model's rate; None where it is not wanted.
    """

    frames: np.ndarray
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
            fps = float(told) if isinstance(told, int | float | np.number) else 0.0
            if not 0 < fps < float("inf"):
                raise Undecodable(f"fps is {told!r}; frames a second above 0 were expected", item=item)
        source = source["frames"]
    frames = _frames(source, limits, item)
    return Encoded(write_lossless(frames, fps), f"{len(frames)} frames {frames.shape[2]}x{frames.shape[1]}")


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
            if packet.size and packet.is_discard:
                discarded += 1  # an edit list leaves it out
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


def decode(encoded: Encoded, header: VideoHeader, wanted: Sequence[int], item: str = "video") -> np.ndarray:
    """Frames as a person sees them, upright: uint8 [wanted, height, width, 3].

    Args:
        encoded: the file.
        header: what `read_header` said of it.
        wanted: numbers of the frames in the order in which they are shown, ascending; one may come twice.
        item: which item of the sample, for messages.

    Raises:
        Undecodable: damaged data, or fewer frames than its packets promise.
    """
    found = np.empty((len(wanted), header.height, header.width, 3), np.uint8)
    place = number = 0
    with opened(encoded, item, "a video") as container:
        stream = _track(container, encoded, item)
        for frame in container.decode(stream):
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
                if pixels.shape != found.shape[1:]:
                    raise Undecodable(
                        f"the header promises frames of {header.width} x {header.height} pixels, frame "
                        f"{number} has {pixels.shape[1]} x {pixels.shape[0]}",
                        item=item,
                        source=encoded.label,
                    )
                while place < len(wanted) and number == wanted[place]:
                    found[place] = pixels
                    place += 1
            number += 1
    if place < len(wanted):
        raise Undecodable(
            f"the video is cut off: {number} of {header.frames} frames could be decoded",
            item=item,
            source=encoded.label,
        )
    return found


def write_lossless(frames: np.ndarray, fps: float) -> bytes:
    """Frames uint8 [frames, height, width, 3] as an MP4 of FFV1, of which they can be had back bit for bit.

    The same frames give the same bytes.
    """
    import av

    target = io.BytesIO()
    with av.open(target, "w", format="mp4") as container:
        stream = container.add_stream("ffv1", rate=Fraction(fps).limit_denominator(1001))
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "bgr0"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode(None))
    return target.getvalue()


def digest(encoded: Encoded) -> bytes:
    """A 16-byte hash of the file."""
    return hashlib.blake2b(encoded.data, digest_size=16).digest()


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


def _frames(source: Any, limits: Limits, item: str) -> np.ndarray:
    """Bytes [frames, height, width, 3] of frames given one by one."""
    if type(source).__module__.partition(".")[0] == "torch" and source.ndim == 4:
        source = source.detach().cpu().numpy().transpose(0, 2, 3, 1)
    if isinstance(source, np.ndarray):
        if source.ndim != 4 or source.shape[3] != 3 or source.dtype != np.uint8:
            raise Undecodable(
                "frames as an array are uint8 [frames, height, width, 3] (torch: channels before height), "
                f"not {source.dtype} {list(source.shape)}",
                item=item,
            )
        count, pixels = len(source), source.shape[1] * source.shape[2]
    elif isinstance(source, Sequence):
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
    if isinstance(source, np.ndarray):
        if source.size == 0:
            raise Empty("the frames have no pixels", item=item)
        return np.ascontiguousarray(source)
    pictures = [_picture(frame, limits, f"{item} frame {number}") for number, frame in enumerate(source)]
    sizes = {picture.size for picture in pictures}
    if len(sizes) > 1:
        raise Undecodable(
            f"its frames have different sizes, {sorted(sizes)[0]} and {sorted(sizes)[-1]}: bring them to one",
            item=item,
        )
    return np.stack([np.asarray(picture) for picture in pictures])


def _picture(frame: Any, limits: Limits, item: str) -> Image.Image:
    resolved = sources.resolve(frame, limits, item)
    return images.decode(resolved, images.read_header(resolved, limits, item), item)
