"""Sounds and videos that lie, are damaged, or are of kinds that few have: each an item or a named refusal."""

import io
import os
import struct
import threading
import tracemalloc
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import soundfile
from omni_processor import (
    Budget,
    BudgetExceeded,
    Empty,
    Limits,
    SourceNotAllowed,
    TooLarge,
    Undecodable,
    collate,
)
from PIL import Image


def shown(processor, source, **options):
    return processor("<video>", videos=[source], **options).media[0]


def heard(omni, source):
    return omni("<audio>", audios=[source]).media[0]


@pytest.fixture
def at_times(make_frames):
    """A function: moments in thousandths of a second -> a video with a frame at each."""

    def make(moments, codec="libx264", container="matroska", pixels="yuv420p", size=(64, 96), **options):
        target = io.BytesIO()
        with av.open(target, "w", format=container) as file:
            stream: Any = file.add_stream(codec, rate=25, options=options)
            stream.height, stream.width = size
            stream.pix_fmt = pixels
            stream.codec_context.time_base = Fraction(1, 1000)
            for moment, pixels_of in zip(moments, make_frames(len(moments), *size), strict=True):
                frame = av.VideoFrame.from_ndarray(pixels_of, format="rgb24")
                frame.pts = moment
                frame.time_base = stream.codec_context.time_base
                file.mux(stream.encode(frame))
            file.mux(stream.encode(None))
        return target.getvalue()

    return make


SOURCES = [
    ({"bytes": "text", "path": None}, SourceNotAllowed, '"bytes" of a mapping is str'),
    ({"bytes": 10**12}, SourceNotAllowed, '"bytes" of a mapping is int'),
    ({"bytes": [300, 1]}, SourceNotAllowed, '"bytes" of a mapping is list'),
    ("file://[bad/a", Undecodable, "the URL is malformed"),
    ("file:///a\ud800", Undecodable, "the URL is malformed"),
    ("data:;base64,AA\ud800", Undecodable, "no Unicode text"),
    ("data:,%41\ud800", Undecodable, "no Unicode text"),
    ("/nowhere/\udcff\ud800", Undecodable, "cannot be opened"),
    ("/nowhere/\0", Undecodable, "cannot be opened"),
    ("gopher://host/a", SourceNotAllowed, "gopher:// is not fetched here"),
    ("rtsp://host/a", SourceNotAllowed, "rtsp:// is not fetched here"),
    ("concat:/etc/hostname|/etc/hosts", Undecodable, "cannot be opened"),
    ("data:audio/wav;base64,UklG*", Undecodable, "base64 is malformed"),
    ("/", SourceNotAllowed, "this is a folder"),
    ("/dev/zero", SourceNotAllowed, "a device, pipe or socket"),
    (True, SourceNotAllowed, "cannot read"),
    (object(), SourceNotAllowed, "cannot read"),
]


@pytest.mark.parametrize("kind", ["image", "audio", "video"])
@pytest.mark.parametrize(("source", "error", "reason"), SOURCES)
def test_sources_that_name_nothing_are_refused_and_the_message_is_printable(
    omni, kind, source, error, reason
):
    with pytest.raises(error, match=reason) as caught:
        omni(f"<{kind}>", **{f"{kind}s": [source]})
    str(caught.value).encode()


@pytest.mark.parametrize("kind", ["image", "audio", "video"])
def test_links_that_turn_in_circles_and_pipes_are_refused_at_once(omni, tmp_path, kind):
    loop, pipe = tmp_path / "loop", tmp_path / "pipe"
    loop.symlink_to(loop)
    os.mkfifo(pipe)
    for path, reason in ((loop, "symbolic links"), (pipe, "a device, pipe or socket")):
        with pytest.raises((Undecodable, SourceNotAllowed), match=reason):
            omni(f"<{kind}>", **{f"{kind}s": [path]})


def test_a_file_whose_name_is_no_text_is_read_and_named(omni, make_wave, write_sound, tmp_path):
    path = os.fsdecode(os.fsencode(tmp_path) + b"/\xff.wav")
    Path(path).write_bytes(write_sound(make_wave(0.2)))
    assert heard(omni, path)["input_features"].shape[2] == 20
    Path(path).write_bytes(b"no sound")
    with pytest.raises(Undecodable) as caught:
        heard(omni, path)
    assert "\\udcff.wav" in str(caught.value)


# Videos


@pytest.mark.parametrize(
    ("fps", "reason"),
    [
        (1e-9, "fps is 1e-09"),
        (1e300, "fps is 1e"),
        (10**400, "fps is 1000"),
        (float("nan"), "fps is nan"),
        (float("inf"), "fps is inf"),
        (True, "fps is True"),
        ("2", "fps is '2'"),
    ],
)
def test_rates_that_no_video_has_are_refused(processor, make_frames, fps, reason):
    with pytest.raises(Undecodable, match=reason):
        shown(processor, {"frames": make_frames(2), "fps": fps})


@pytest.mark.parametrize("fps", [0.001, 0.7, 23.976, 1000])
def test_the_slowest_and_fastest_rates_are_kept(make_processor, make_frames, fps):
    item = shown(make_processor(limits=Limits(max_seconds=10**4)), {"frames": make_frames(2), "fps": fps})
    assert item["timestamps"] == pytest.approx([0.5 / fps], rel=1e-3)


@pytest.mark.parametrize("size", [(1, 1), (1, 7), (3, 5), (31, 33), (2, 900)])
def test_odd_and_tiny_frames_are_shown(processor, make_frames, at_times, size):
    frames = np.random.default_rng(0).integers(0, 255, (3, *size, 3)).astype(np.uint8)
    assert shown(processor, frames)["kind"] == "video"
    if min(size) > 1:
        film = (
            at_times(range(0, 900, 300), codec="ffv1", pixels="bgr0", size=(*size,)) if size[1] > 20 else None
        )
        if film is not None:
            assert shown(processor, film)["kind"] == "video"


def test_frames_that_no_container_holds_are_refused_by_size(make_processor):
    wide = np.zeros((1, 1, 70_000, 3), np.uint8)
    with pytest.raises(Undecodable, match="frames of 70000 x 1 pixels cannot be a video"):
        shown(make_processor(), wide)


def test_frames_are_refused_when_they_come_to_too_many_bytes(make_processor):
    noise = np.random.default_rng(0).integers(0, 255, (40, 128, 128, 3)).astype(np.uint8)
    with pytest.raises(TooLarge, match="written losslessly its frames take more than 100000 bytes"):
        shown(make_processor(limits=Limits(max_stream_bytes=100_000)), noise)


@pytest.mark.parametrize("frames", [5, "abc", b"abc", {"a": 1}, iter(())])
def test_what_is_no_list_of_frames_is_refused(processor, frames):
    with pytest.raises(SourceNotAllowed, match="cannot read a video from"):
        shown(processor, {"frames": frames, "fps": 2})


def test_one_frame_and_uneven_and_negative_times_are_shown(processor, omni, at_times):
    for moments in ([0], [0, 10, 20, 3000, 3010], [500, 1500], [-400, -200, 0, 200]):
        film = at_times(moments)
        plan = processor.plan(film, "video")
        item = shown(processor, film)
        assert item["video_grid_thw"].tolist() == [list(plan.grid)]
        assert (np.diff(item["timestamps"]) > 0).all()
        assert shown(omni, film)["kind"] == "video"


@pytest.mark.parametrize(
    ("codec", "pixels"),
    [("ffv1", "yuv444p10le"), ("ffv1", "gray"), ("ffv1", "bgra"), ("ffv1", "rgb48le")],
)
def test_deep_grey_and_see_through_pixels_are_shown(processor, at_times, codec, pixels):
    plain = shown(processor, at_times(range(0, 1000, 250), "ffv1", pixels="bgr0"))
    item = shown(processor, at_times(range(0, 1000, 250), codec, pixels=pixels))
    tolerance = 0.2 if pixels == "gray" else 0.05
    assert np.abs(item["pixel_values_videos"] - plain["pixel_values_videos"]).mean() < tolerance


def test_frames_that_are_decoded_but_never_shown_are_no_frames(processor, make_frames, write_video):
    """VP8's encoder writes frames that others only refer to, each as a packet of its own."""
    plain = write_video(make_frames(12), 4, "libvpx", "webm")
    target = io.BytesIO()
    with av.open(io.BytesIO(plain)) as source, av.open(target, "w", format="webm") as file:
        stream = file.add_stream_from_template(source.streams.video[0])
        for number, packet in enumerate(source.demux(video=0)):  # type: ignore[reportAttributeAccessIssue]
            if packet.size:
                content = bytearray(bytes(packet))
                if number in (4, 9):
                    content[0] &= ~0x10  # show_frame (RFC 6386, section 9.1)
                hidden = av.Packet(bytes(content))
                hidden.pts, hidden.dts = packet.pts, packet.dts
                hidden.time_base, hidden.stream = packet.time_base, stream
                hidden.is_keyframe = packet.is_keyframe
                file.mux(hidden)
    film = target.getvalue()
    assert max(processor.plan(film, "video").frames) == 9
    assert shown(processor, film)["video_grid_thw"].tolist() == [list(processor.plan(film, "video").grid)]


def test_an_animated_gif_is_a_video_and_an_animated_webp_says_what_it_is(processor, make_frames):
    pictures = [Image.fromarray(frame) for frame in make_frames(4)]
    for form in ("GIF", "WEBP"):
        file = io.BytesIO()
        pictures[0].save(file, form, save_all=True, append_images=pictures[1:], duration=250)
        if form == "GIF":
            assert shown(processor, file.getvalue())["video_grid_thw"][0, 0] == 2
        else:
            with pytest.raises(Undecodable, match="not a video in a container read here"):
                shown(processor, file.getvalue())
        assert processor("<image>", images=[file.getvalue()]).media[0]["kind"] == "image"


def test_a_header_that_claims_frames_by_the_thousand_million_is_told(processor, make_frames, write_video):
    data = bytearray(write_video(make_frames(6), 4, "mpeg4", "avi"))
    at = data.index(b"strh")
    data[at + 8 + 32 : at + 8 + 36] = struct.pack("<I", 10**9)  # dwLength of the stream
    with pytest.raises((Undecodable, TooLarge), match=r"6 of 1000000000 frames|s long|frames"):
        shown(processor, bytes(data))


def test_frames_are_never_all_in_memory_at_their_own_size(make_processor):
    frame = np.zeros((900, 1200, 3), np.uint8)
    frame[::2] = 255
    tracemalloc.start()
    try:
        item = shown(make_processor(), {"frames": [frame] * 12, "fps": 2})
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert item["video_grid_thw"][0, 0] == 6
    assert peak < 8 * frame.nbytes


# Sounds


@pytest.mark.parametrize(
    ("rate", "reason"),
    [
        (float("nan"), "sampling_rate is nan"),
        (float("inf"), "sampling_rate is inf"),
        (10**9, "sampling_rate is 1000000000"),
        (-16000, "sampling_rate is -16000"),
        (True, "sampling_rate is True"),
        ("16000", "sampling_rate is '16000'"),
    ],
)
def test_rates_that_no_sound_has_are_refused(omni, make_wave, rate, reason):
    with pytest.raises(Undecodable, match=reason):
        heard(omni, {"array": make_wave(0.2), "sampling_rate": rate})


@pytest.mark.parametrize("rate", [8000, 11025, 44100, 192_000])
def test_slow_and_fast_rates_are_heard(omni, make_wave, write_sound, rate):
    item = heard(omni, write_sound(make_wave(0.5, rate), rate))
    assert item["input_features"].shape[2] == 50
    assert np.isfinite(item["input_features"]).all()


@pytest.mark.parametrize("channels", [1, 2, 6, 8])
def test_many_channels_are_heard_from_either_reader(omni, make_wave, channels):
    waves = np.stack([make_wave(0.5, seed=seed) for seed in range(channels)])
    levels = np.rint(waves * 32767).astype(np.int16)
    expected = heard(omni, {"array": levels / np.float32(32768), "sampling_rate": 16000})
    for container in ("WAV", "FLAC"):
        file = io.BytesIO()
        soundfile.write(file, levels.T, 16000, format=container, subtype="PCM_16")
        found = heard(omni, file.getvalue())["input_features"]
        assert np.abs(found - expected["input_features"]).max() < 1e-5
    target = io.BytesIO()
    with av.open(target, "w", format="matroska") as film:
        layout = {1: "mono", 2: "stereo", 6: "5.1", 8: "7.1"}[channels]
        track: Any = film.add_stream("pcm_s16le", rate=16000, layout=layout)
        frame = av.AudioFrame.from_ndarray(levels.T.reshape(1, -1).copy(), format="s16", layout=layout)
        frame.sample_rate = 16000
        film.mux(track.encode(frame))
        film.mux(track.encode(None))
    found = heard(omni, target.getvalue())["input_features"]
    assert np.abs(found - expected["input_features"]).max() < 1e-5


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_samples_that_are_no_numbers_are_refused(omni, make_wave, write_sound, bad):
    wave = make_wave(0.3)
    wave[1000] = bad
    for source in (write_sound(wave), wave, np.stack([wave, wave]), wave.astype(np.float64)):
        with pytest.raises(Undecodable, match="not finite"):
            heard(omni, source)


def test_samples_on_another_scale_are_refused(omni, make_wave, write_sound):
    for scale in (32768, 1e30):
        for source in (make_wave(0.3) * np.float32(scale), write_sound(make_wave(0.3) * np.float32(scale))):
            with pytest.raises(Undecodable, match=r"floats in -1\.\.1 were expected"):
                heard(omni, source)
    with pytest.raises(Undecodable, match="not finite"):
        heard(omni, make_wave(0.3).astype(np.float64) * 1e300)
    assert np.isfinite(heard(omni, make_wave(0.3) * 3)["input_features"]).all()  # clipped, and heard


@pytest.mark.parametrize(("container", "subtype"), [("XI", "DPCM_8"), ("SVX", "PCM_16"), ("MAT5", "FLOAT")])
def test_formats_that_nobody_uses_are_left_to_nobody(omni, make_wave, write_sound, container, subtype):
    """libsndfile opens them, and not all of what it opens can be read."""
    with pytest.raises(Undecodable, match="not a sound in a container"):
        heard(omni, write_sound(make_wave(0.3), container=container, subtype=subtype))


def test_silence_is_heard_and_a_thousandth_of_a_second_is_too_short(omni, write_sound):
    item = heard(omni, write_sound(np.zeros(8000, np.float32)))
    assert np.isfinite(item["input_features"]).all()
    for samples in (1, 16, 160, 200):
        with pytest.raises(Empty, match="hears nothing in less than"):
            heard(omni, write_sound(np.zeros(samples, np.float32)))
    with pytest.raises(Empty):
        heard(omni, write_sound(np.zeros(0, np.float32)))


def test_headers_that_claim_hours_are_told(omni, make_wave, write_sound):
    wav = bytearray(write_sound(make_wave(0.5), subtype="PCM_16"))
    at = wav.index(b"data")
    wav[at + 4 : at + 8] = struct.pack("<I", 2 * 16000 * 7200)
    with pytest.raises(Undecodable, match="8000 of 115200000 samples could be read"):
        heard(omni, bytes(wav))
    fast = bytearray(write_sound(make_wave(0.5), subtype="PCM_16"))
    at = fast.index(b"fmt ")
    fast[at + 12 : at + 16] = struct.pack("<I", 2**31)
    with pytest.raises(Undecodable, match=r"samples a second|container"):
        heard(omni, bytes(fast))
    unknown = bytearray(write_sound(make_wave(0.5), container="FLAC", subtype="PCM_16"))
    unknown[21] &= 0xF0  # a writer that could not go back: no length at all
    unknown[22:26] = bytes(4)
    item = heard(omni, bytes(unknown))
    whole = heard(omni, write_sound(make_wave(0.5), container="FLAC", subtype="PCM_16"))
    np.testing.assert_array_equal(item["input_features"], whole["input_features"])


def test_what_a_sound_comes_to_is_held_to_the_budget_too(make_omni, make_wave, write_sound):
    """Of a compressed file the length is what its header says, and headers lie."""
    sound = make_wave(4.0)
    film = io.BytesIO()
    with av.open(film, "w", format="mp4") as file:
        track: Any = file.add_stream("aac", rate=16000, layout="mono")
        frame = av.AudioFrame.from_ndarray(sound[None], format="fltp", layout="mono")
        frame.sample_rate = 16000
        file.mux(track.encode(frame))
        file.mux(track.encode(None))
    data = bytearray(film.getvalue())
    at = data.index(b"mdhd")
    scale = struct.unpack(">I", data[at + 16 : at + 20])[0]
    data[at + 20 : at + 24] = struct.pack(">I", scale // 2)  # half a second
    data = bytes(data)
    assert make_omni().plan(data, "audio").tokens < 20
    assert make_omni()("<audio>", audios=[data]).token_counts["audio"] > 40
    with pytest.raises(BudgetExceeded, match="allowed are 20"):
        make_omni(budget=Budget(max_sample_tokens=20))("<audio>", audios=[data])


# Rows of everything


def test_everything_in_one_text_stands_in_its_order(omni, make_frames, make_wave, write_video, picture):
    film = write_video(make_frames(8), 4, container="matroska", sound=make_wave(1.0))
    text = "a<video>b<image>c<audio>d<image><video>"
    sample = omni(text, images=[picture, picture], audios=[make_wave(0.3)], videos=[film, make_frames(4)])
    assert [item["kind"] for item in sample.media] == ["video", "image", "audio", "image", "video"]
    assert [span.kind for span in sample.spans] == ["video", "image", "audio", "image", "video"]
    assert collate(sample.media)["pixel_values_videos"].shape[0] == sum(
        item["video_grid_thw"].prod() for item in sample.media if item["kind"] == "video"
    )
    part = {"type": "video", "video": film, "use_audio_in_video": True}
    mixed = omni([{"role": "user", "content": [part, {"type": "video", "video": film}]}])
    assert [("input_features" in item) for item in mixed.media] == [True, False]


def test_placeholders_that_a_user_typed_are_refused_by_name(omni, picture):
    for typed in ("<|image_pad|>", "<|audio_pad|>", "<|video_pad|>"):
        kind = typed[2:-6]
        for content in (typed, f"a {typed} b"):
            with pytest.raises(Exception, match=f"{kind} placeholder") as caught:
                omni([{"role": "user", "content": [content, {"type": "image", "image": picture}]}])
            assert type(caught.value).__name__ == "SpanMismatch"


def test_threads_share_a_processor_for_every_kind(make_omni, make_frames, make_wave, write_video, picture):
    films = [
        write_video(make_frames(6, seed=seed), 4, container="matroska", sound=make_wave(1.0))
        for seed in (0, 1)
    ]

    def sample(processor, film):
        return processor("<image>x<audio>y<video>", images=[picture], audios=[film], videos=[film])

    fresh = make_omni()
    expected = [sample(fresh, film) for film in films]
    shared, found = make_omni(), {}

    def work(number):
        for turn in range(3):
            which = (number + turn) % 2
            found[number, turn] = which, sample(shared, films[which])
            shared.encode_text(f"text {number} {turn}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 12
    for which, made in found.values():
        np.testing.assert_array_equal(made.tokens, expected[which].tokens)
        for item, other in zip(made.media, expected[which].media, strict=True):
            for name, value in other.items():
                np.testing.assert_array_equal(item[name], value)
