"""Sounds: every way people hand one over, its length from the header, its samples as the model wants them.

Accepted: what `omni_processor.encoded` reads (WAV, FLAC, MP3, Ogg and whatever else libsndfile or PyAV opens,
the sound track of a video included), ``{"array": ..., "sampling_rate": ...}``, a numpy array or torch tensor
[samples] or [channels, samples] (at the model's own rate if no other is told), a decoded datasets Audio cell.

Samples come out mono (the mean of the channels) and float32, at the model's rate by soxr's high quality, as
librosa resamples, which transformers reads sound with.
"""

from __future__ import annotations

import hashlib
import io
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from omni_processor import cancellation
from omni_processor.containers import opened
from omni_processor.encoded import Encoded, Reading
from omni_processor.errors import Empty, SourceNotAllowed, TooLarge, Undecodable
from omni_processor.sample import Limits

if TYPE_CHECKING:
    from av import AudioFrame

MAX_CHANNELS = 16
"""Of an array; more are taken for samples that lie the other way round."""

MAX_SAMPLES = 2**29
"""Of all channels together, whatever the rate: two GiB as numbers, three hours of stereo at 24 kHz."""

FORMATS = ("WAV", "WAVEX", "RF64", "W64", "FLAC", "OGG", "MP3", "AIFF", "AU", "CAF", "NIST")
"""What libsndfile reads here. Of the rest that it knows, some are of programs long gone, and hardly tried."""

LOUDEST = 100.0
"""Farthest that a sample may lie from 0, where -1..1 is full scale: what lies farther is on another scale."""

FASTEST = 10**6
"""Samples a second of what is resampled; of every sound there is a few times over."""

_BLOCK = 2**20
_UNKNOWN_LENGTH = 2**63 - 1  # of libsndfile, where a header leaves it out


@dataclass(frozen=True, slots=True)
class Waveform:
    """Samples somebody decoded already: float32 or int16 [channels, samples]."""

    samples: np.ndarray
    rate: int
    label: str


@dataclass(frozen=True, slots=True)
class SoundHeader:
    """What is known before decoding.

    Attributes:
        seconds: how long it is; an estimate for compressed formats that do not say.
        rate: samples a second.
        channels: how many.
        container: whether PyAV reads it; libsndfile otherwise.
    """

    seconds: float
    rate: int
    channels: int
    container: bool = False


ResolvedSound = Encoded | Waveform


def resolve(source: Any, limits: Limits, rate: int, item: str = "audio") -> ResolvedSound:
    """Bring any accepted source to bytes or samples without decoding it.

    Args:
        source: see the module.
        limits: of bytes and seconds.
        rate: of arrays that come without one, in samples a second.
        item: which item of the sample, for messages.

    Raises:
        SourceNotAllowed, Undecodable, TooLarge, Empty: as `omni_processor.encoded` does; Undecodable also for
            arrays whose shape or type is not a sound's.
    """
    reading = Reading(item, "a sound", limits.max_stream_bytes, "max_stream_bytes")
    encoded = reading.read(source)
    if encoded is not None:
        return encoded
    if isinstance(source, Mapping):
        if source.get("array") is None:
            return reading.cell(source)
        told = source.get("sampling_rate")
        number = isinstance(told, int | float | np.number) and not isinstance(told, bool)
        if told is None or not number or not 1 <= told <= FASTEST:
            raise Undecodable(
                f"sampling_rate is {told!r:.40}; a sound as an array needs its samples a second, 1 to "
                f"{FASTEST}: "
                '{"array": ..., "sampling_rate": 16000}',
                item=item,
            )
        return _waveform(source["array"], int(told), limits, item)
    if hasattr(source, "get_all_samples"):  # torchcodec's decoder, which a datasets cell is
        decoded = source.get_all_samples()
        return _waveform(decoded.data, int(decoded.sample_rate), limits, item)
    if isinstance(source, np.ndarray) or type(source).__module__.partition(".")[0] == "torch":
        return _waveform(source, rate, limits, item)
    raise SourceNotAllowed(
        f"cannot read a sound from {type(source).__name__}: pass a path, file:// or data URL, bytes, "
        '{"array": ..., "sampling_rate": ...}, a numpy array or {"bytes": ..., "path": ...}',
        item=item,
    )


def read_header(resolved: ResolvedSound, limits: Limits, item: str = "audio") -> SoundHeader:
    """Length and rate without decoding any samples.

    Raises:
        Undecodable: no sound in a format read here, or a damaged header.
        Empty: a video without a sound track.
        TooLarge: longer than `limits.max_seconds`.
    """
    if isinstance(resolved, Waveform):
        header = SoundHeader(resolved.samples.shape[1] / resolved.rate, resolved.rate, len(resolved.samples))
    else:
        header = _sound_file(resolved)
        if header is None:
            return track_header(resolved, limits, item)
    _check_length(header, limits, item, resolved.label)
    return header


def track_header(encoded: Encoded, limits: Limits, item: str) -> SoundHeader:
    """The same of a container's first sound track, read by PyAV. Raises: as `read_header`."""
    with opened(encoded, item, "a sound") as container:
        if not container.streams.audio:
            raise Empty("it has no sound track", item=item, source=encoded.label)
        stream = container.streams.audio[0]
        if stream.codec_context is None or not stream.rate or not stream.codec_context.channels:
            raise Undecodable(
                "its sound track is of an unknown codec, or does not say its rate",
                item=item,
                source=encoded.label,
            )
        if stream.duration is not None and stream.time_base is not None:
            seconds = float(stream.duration * stream.time_base)
        else:  # Matroska says it of the whole file only
            first = last = None
            for packet in container.demux(stream):
                cancellation.check()
                if packet.pts is not None and packet.time_base is not None:
                    start = packet.pts * packet.time_base
                    end = start + (packet.duration or 0) * packet.time_base
                    first = start if first is None else min(first, start)
                    last = end if last is None else max(last, end)
            seconds = 0.0 if first is None or last is None else float(last - first)
        header = SoundHeader(seconds, int(stream.rate), int(stream.codec_context.channels), container=True)
    _check_length(header, limits, item, encoded.label)
    return header


def decode(
    resolved: ResolvedSound, header: SoundHeader, rate: int, limits: Limits, item: str = "audio"
) -> np.ndarray:
    """Mono samples float32 [samples] at `rate`.

    Raises:
        Undecodable: damaged or cut off data, or samples that are no numbers.
        Empty: no samples.
        TooLarge: longer than `limits.max_seconds`, which its header did not say.
    """
    if isinstance(resolved, Waveform):
        samples = _as_float(resolved.samples)
    elif header.container:
        samples = _decode_track(resolved, header, limits, item)
    else:
        samples = _decode_sound_file(resolved, item)
    if not samples.size:
        raise Empty("the sound has no samples", item=item, source=resolved.label)
    peak = max(float(samples.max()), -float(samples.min()))
    if not np.isfinite(peak):  # a NaN is the largest of any numbers
        raise Undecodable(
            "the sound has samples that are not finite numbers", item=item, source=resolved.label
        )
    if peak > LOUDEST:
        raise Undecodable(
            f"the sound has samples as far from 0 as {peak:g}; floats in -1..1 were expected: divide by full "
            "scale, or pass int16",
            item=item,
            source=resolved.label,
        )
    mono = samples.mean(axis=0, dtype=np.float32) if len(samples) > 1 else samples[0]
    cancellation.check()
    return _resampled(mono, header.rate, rate)


def file_of(resolved: ResolvedSound) -> np.ndarray:
    """The encoded original, uint8 [bytes]; a waveform as WAV of 16 bits or 32-bit floats, bit for bit."""
    if isinstance(resolved, Encoded):
        return np.frombuffer(resolved.data, np.uint8)
    import soundfile

    target = io.BytesIO()
    subtype = "PCM_16" if resolved.samples.dtype == np.int16 else "FLOAT"
    soundfile.write(target, resolved.samples.T, resolved.rate, format="WAV", subtype=subtype)
    return np.frombuffer(target.getvalue(), np.uint8)


def digest(resolved: ResolvedSound) -> bytes:
    """A 16-byte hash of what the source holds."""
    hasher = hashlib.blake2b(digest_size=16)
    if isinstance(resolved, Encoded):
        hasher.update(resolved.data)
    else:
        samples = resolved.samples
        hasher.update(f"{samples.dtype} {samples.shape} {resolved.rate}".encode())
        hasher.update(np.ascontiguousarray(samples))
    return hasher.digest()


def _check_length(header: SoundHeader, limits: Limits, item: str, label: str) -> None:
    if header.rate > FASTEST:
        raise Undecodable(
            f"its header says {header.rate} samples a second; at most {FASTEST} are read",
            item=item,
            source=label,
        )
    _check_seconds(header.seconds, limits, item, label)
    _check_samples(header.seconds * header.rate * header.channels, item, label)


def _check_seconds(seconds: float, limits: Limits, item: str, label: str) -> None:
    if not seconds <= limits.max_seconds:
        raise TooLarge(
            f"{seconds:.1f} s long, the limit is {limits.max_seconds:g} s: cut it or raise "
            "Limits(max_seconds=...)",
            item=item,
            source=label,
        )


def _check_samples(count: float, item: str, label: str) -> None:
    if count > MAX_SAMPLES:
        raise TooLarge(
            f"{count:.0f} samples over all channels, at most {MAX_SAMPLES} are decoded: cut it, or bring it "
            "to a lower rate and fewer channels",
            item=item,
            source=label,
        )


def _waveform(array: Any, rate: int, limits: Limits, item: str) -> Waveform:
    if type(array).__module__.partition(".")[0] == "torch":
        array = array.detach().cpu()
        array = (array.float() if array.is_floating_point() else array).numpy()
    array = np.asarray(array)
    label = f"{array.dtype} {list(array.shape)} at {rate} Hz"
    if array.size == 0:
        raise Empty("the array has no samples", item=item, source=label)
    samples = array[None] if array.ndim == 1 else array
    if samples.ndim != 2 or len(samples) > MAX_CHANNELS:
        raise Undecodable(
            f"a sound is [samples] or [channels, samples] with at most {MAX_CHANNELS} channels; transpose "
            "turns samples, channels into it",
            item=item,
            source=label,
        )
    if samples.dtype.kind == "f":
        with np.errstate(over="ignore"):  # what float32 cannot hold is refused when it is looked at
            samples = samples.astype(np.float32)
    elif samples.dtype != np.int16:
        raise Undecodable(
            f"{samples.dtype} is no type of samples: use floats in -1..1, or int16", item=item, source=label
        )
    _check_seconds(samples.shape[1] / rate, limits, item, label)
    return Waveform(samples, rate, label)


def _as_float(samples: np.ndarray) -> np.ndarray:
    return samples.astype(np.float32) / np.float32(32768) if samples.dtype == np.int16 else samples


def _sound_file(encoded: Encoded) -> SoundHeader | None:
    """What libsndfile says of it; None if that is none of `FORMATS`, or it does not know how long it is."""
    import soundfile

    try:
        with soundfile.SoundFile(io.BytesIO(encoded.data)) as file:
            if file.format not in FORMATS or not file.seekable() or file.frames >= _UNKNOWN_LENGTH:
                return None
            return SoundHeader(file.frames / file.samplerate, file.samplerate, file.channels)
    except soundfile.LibsndfileError:
        return None


def _decode_sound_file(encoded: Encoded, item: str) -> np.ndarray:
    import soundfile

    try:
        with soundfile.SoundFile(io.BytesIO(encoded.data)) as file:
            promised = max(file.frames, _promised_by_wav(encoded.data))
            # Block by block: memory follows what is there, not what the header promises.
            blocks: list[np.ndarray] = []
            for block in file.blocks(_BLOCK, dtype="float32", always_2d=True):
                cancellation.check()
                blocks.append(block)
    except soundfile.LibsndfileError as error:
        raise Undecodable(
            f"the sound is damaged or cut off: {error}", item=item, source=encoded.label
        ) from error
    samples = np.concatenate(blocks) if blocks else np.empty((0, 1), np.float32)
    if len(samples) < promised:
        raise Undecodable(
            f"the sound is cut off: {len(samples)} of {promised} samples could be read",
            item=item,
            source=encoded.label,
        )
    return samples.T


def _promised_by_wav(data: bytes) -> int:
    """Samples that a WAV's header promises; 0 of other files, and of WAVs whose writer did not know.

    libsndfile takes what is there of a cut off one without a word.
    """
    if data[:4] != b"RIFF" or data[8:12] != b"WAVE":
        return 0
    at, block = 12, 0
    while at + 8 <= len(data):
        name, size = data[at : at + 4], int.from_bytes(data[at + 4 : at + 8], "little")
        if name == b"fmt ":
            block = int.from_bytes(data[at + 20 : at + 22], "little")  # bytes of a sample of all channels
        if name == b"data":
            return size // block if block and size < _UNKNOWN_SIZE else 0
        at += 8 + size + size % 2
    return 0


_UNKNOWN_SIZE = 0x7FFFF000  # and above: what streaming writers put


def _decode_track(encoded: Encoded, header: SoundHeader, limits: Limits, item: str) -> np.ndarray:
    import av

    parts: list[np.ndarray] = []
    count = 0
    with opened(encoded, item, "a sound") as container:
        stream = container.streams.audio[0]
        # Channels beside each other: PyAV gives no more than 7 planes to numpy.
        resampler = av.AudioResampler(format="flt", layout=stream.layout, rate=header.rate)
        frames = (part for frame in container.decode(stream) for part in resampler.resample(frame))
        for frame in frames:
            cancellation.check()
            parts.append(_planes(frame))
            count += parts[-1].shape[1]
            _check_seconds(count / header.rate, limits, item, encoded.label)
            _check_samples(count * len(parts[-1]), item, encoded.label)
        parts += [_planes(frame) for frame in resampler.resample(None)]
    return np.concatenate(parts, axis=1) if parts else np.empty((1, 0), np.float32)


def _planes(frame: AudioFrame) -> np.ndarray:
    """[channels, samples] of a frame whose channels lie beside each other."""
    return frame.to_ndarray().reshape(-1, frame.layout.nb_channels).T


def _resampled(mono: np.ndarray, rate: int, wanted: int) -> np.ndarray:
    """To `wanted` samples a second, ceil(samples * wanted / rate) of them, as librosa does."""
    if rate == wanted:
        return np.ascontiguousarray(mono)
    import soxr

    length = math.ceil(len(mono) * wanted / rate)
    made = soxr.resample(mono, rate, wanted, quality="HQ")[:length]
    return np.pad(made, (0, length - len(made)))
