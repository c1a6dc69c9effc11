"""Every shape of a video's source, what is refused, and what stands among a video's placeholders."""

import base64
from pathlib import Path

import numpy as np
import pytest
from omni_processor import (
    Budget,
    BudgetExceeded,
    Empty,
    Limits,
    MediaError,
    OmniProcessor,
    SourceNotAllowed,
    SpanMismatch,
    TooLarge,
    Undecodable,
)
from PIL import Image


def shown(processor, source, **options):
    return processor("<video>", videos=[source], **options).media[0]


def levels(item) -> np.ndarray:
    """Mean level of each step in time."""
    time = int(item["video_grid_thw"][0, 0])
    return item["pixel_values_videos"].reshape(time, -1).mean(1)


@pytest.fixture(scope="module")
def film(make_frames, write_video):
    return write_video(make_frames(12), 4)


def test_every_shape_of_a_video_part_gives_the_same_sample(processor, film, tmp_path):
    path = tmp_path / "a b.mp4"
    path.write_bytes(film)
    encoded = base64.b64encode(film).decode()
    parts = [
        {"type": "video", "video": path},
        {"type": "video_url", "video_url": {"url": path.as_uri()}},
        {"type": "video_url", "video_url": f"data:video/mp4;base64,{encoded}"},
        {"type": "video", "url": str(path), "video": None},
        {"type": "video", "bytes": film},
        {"type": "video", "base64": encoded},
        {"type": "video", "video": {"bytes": film, "path": "gone.mp4"}},
        {"video": str(path)},
    ]
    samples = [processor([{"role": "user", "content": [part]}]) for part in parts]
    samples.append(processor([{"role": "user", "content": "<video>"}], videos=[path]))
    for sample in samples:
        np.testing.assert_array_equal(sample.tokens, samples[0].tokens)
        np.testing.assert_array_equal(
            sample.media[0]["pixel_values_videos"], samples[0].media[0]["pixel_values_videos"]
        )
        assert bytes(sample.media[0]["file"]) == film


def test_every_shape_of_frames_gives_the_same_item_and_file(processor, make_frames):
    torch = pytest.importorskip("torch")
    frames = make_frames(6)
    expected = shown(processor, frames)
    pictures = [Image.fromarray(frame) for frame in frames]
    for source in (
        list(frames),
        pictures,
        tuple(pictures),
        torch.from_numpy(frames).permute(0, 3, 1, 2),
        {"frames": frames, "fps": 2},
        {"frames": pictures, "fps": None},
    ):
        item = shown(processor, source)
        for name in ("pixel_values_videos", "video_grid_thw", "timestamps", "file"):
            np.testing.assert_array_equal(item[name], expected[name])
    # All of them are shown, at the model's own rate; and whoever opens the file sees the same.
    assert expected["video_grid_thw"][0, 0] == 3
    np.testing.assert_allclose(expected["timestamps"], [0.25, 1.25, 2.25])
    again = shown(processor, bytes(expected["file"]))
    np.testing.assert_array_equal(again["pixel_values_videos"], expected["pixel_values_videos"])
    sparse = shown(processor, {"frames": make_frames(24), "fps": 8.0})
    assert sparse["video_grid_thw"][0, 0] == 3


BRIGHTER = np.repeat(np.arange(0, 240, 20, dtype=np.uint8), 64 * 96 * 3).reshape(12, 64, 96, 3)


@pytest.mark.parametrize(
    ("codec", "container", "pixels"),
    [
        ("libx264", "mp4", "yuv420p"),
        ("libx264", "mov", "yuv444p"),
        ("libx265", "mp4", "yuv420p10le"),
        ("libvpx-vp9", "webm", "yuv420p"),
        ("mpeg4", "avi", "yuv420p"),
        ("libx264", "matroska", "yuv420p"),
        ("libx264", "mpegts", "yuv420p"),
        ("ffv1", "matroska", "bgr0"),
        ("gif", "gif", "rgb8"),
    ],
)
def test_codecs_and_containers_are_seen(processor, write_video, codec, container, pixels):
    _grows_brighter(processor, write_video(BRIGHTER, 4, codec, container, pixels))


def test_av1_is_seen(processor):
    """From a file that libsvtav1 made of the same frames. Run by root, that encoder makes the process which
    calls it, and all that this one starts, real-time ones.
    """
    _grows_brighter(processor, (Path(__file__).parent / "data" / "av1.webm").read_bytes())


def _grows_brighter(processor, video):
    item = shown(processor, video)
    assert item["video_grid_thw"].tolist() == [[3, 4, 6]]
    seen = levels(item)
    expected = BRIGHTER[[0, 2, 4, 7, 9, 11]].reshape(3, 2, -1).mean((1, 2)) / 127.5 - 1
    assert np.abs(seen - expected).max() < 0.12
    assert (np.diff(seen) > 0.2).all()


@pytest.mark.parametrize("turned", [90, 180, -90])
def test_rotated_videos_are_upright(processor, write_video, turned):
    frames = np.zeros((4, 64, 128, 3), np.uint8)
    frames[:, :32, :64] = 255  # the upper left quarter
    item = shown(processor, write_video(frames, 2, pixels="yuv444p", rotation=turned))
    upright = shown(
        processor, write_video(np.rot90(frames, turned // 90, (1, 2)).copy(), 2, pixels="yuv444p")
    )
    np.testing.assert_array_equal(item["video_grid_thw"], upright["video_grid_thw"])
    assert np.abs(item["pixel_values_videos"] - upright["pixel_values_videos"]).mean() < 0.02


@pytest.mark.parametrize(
    ("source", "kind", "reason"),
    [
        ("https://example.com/a.mp4", SourceNotAllowed, "not fetched here"),
        ("/nowhere/a.mp4", Undecodable, "cannot be opened"),
        (b"", Empty, "zero bytes"),
        (b"no film at all, " * 40, Undecodable, "not a video in a container"),
        (b"<html></html>", Undecodable, "HTML page"),
        (b"#EXTM3U\n#EXTINF:1,\nfile:///etc/hostname\n", Undecodable, "not a video in a container"),
        ([], Empty, "list of frames is empty"),
        (np.zeros((0, 8, 8, 3), np.uint8), Empty, "list of frames is empty"),
        (np.zeros((2, 0, 8, 3), np.uint8), Empty, "no pixels"),
        (np.zeros((2, 8, 8, 3)), Undecodable, "uint8"),
        (np.zeros((2, 3, 8, 8), np.uint8), Undecodable, "uint8"),
        ([np.zeros((8, 8, 3), np.uint8), np.zeros((8, 9, 3), np.uint8)], Undecodable, "different sizes"),
        ({"frames": [np.zeros((8, 8, 3), np.uint8)], "fps": 0}, Undecodable, "fps is 0"),
        ({"path": None}, Empty, 'needs "bytes" or "path"'),
        (3, SourceNotAllowed, "cannot read a video from int"),
    ],
)
def test_what_is_no_video_is_refused_by_name(processor, source, kind, reason):
    with pytest.raises(kind, match=reason) as caught:
        shown(processor, source)
    assert caught.value.item == "video 0"


def test_a_bad_frame_is_named(processor):
    with pytest.raises(Undecodable) as caught:
        shown(processor, [np.zeros((8, 8, 3), np.uint8), b"no picture"])
    assert caught.value.item == "video 0 frame 1"


def test_a_video_without_a_track_that_is_wanted_is_refused(omni, film, make_wave, write_sound):
    with pytest.raises(Empty, match="no sound track"):
        omni("<video>", videos=[film], use_audio_in_video=True)
    with pytest.raises(Empty, match="no video track"):
        omni("<video>", videos=[write_sound(make_wave(0.5))])
    with pytest.raises(Empty, match="no sound track"):
        omni("<audio>", audios=[film])
    part = {"type": "video", "video": film, "use_audio_in_video": False}
    assert omni([{"role": "user", "content": [part]}], use_audio_in_video=True).token_counts["audio"] == 0


def test_limits_are_held_before_decoding(make_processor, film):
    for limits, reason in (
        (Limits(max_frames=11), "more than 11 frames"),
        (Limits(max_seconds=2.5), "3.0 s long, the limit is 2.5 s"),
        (Limits(max_pixels=64 * 96 - 1), "frames of 96 x 64 pixels"),
        (Limits(max_stream_bytes=100), "max_stream_bytes"),
    ):
        with pytest.raises(TooLarge, match=reason):
            make_processor(limits=limits).plan(film, "video")
    with pytest.raises(TooLarge, match="limits are 2 and"):
        shown(make_processor(limits=Limits(max_frames=2)), np.zeros((3, 8, 8, 3), np.uint8))
    with pytest.raises(BudgetExceeded, match="the media cost 36 tokens"):
        make_processor(budget=Budget(max_sample_tokens=20))("<video><video>", videos=[film, film])


def test_a_cut_off_video_says_how_much_of_it_is_there(processor, make_frames, write_video):
    # What says beforehand how long it is: the index of an AVI or of an MP4 whose index comes first.
    for container in ("avi", "mp4"):
        data = write_video(make_frames(12), 4, "mpeg4", container, early_index=True)
        with pytest.raises(Undecodable, match=r"frames|cut off") as caught:
            shown(processor, data[: len(data) * 2 // 3])
        assert caught.value.item == "video 0"
    # What does not is as long as what is left of it.
    for container in ("matroska", "mpegts"):
        data = write_video(make_frames(12), 4, "mpeg4", container)
        whole, half = (processor.plan(part, "video") for part in (data, data[: len(data) * 2 // 3]))
        assert 0 < len(half.frames) < len(whole.frames)


def test_damaged_videos_are_videos_or_media_errors_and_nothing_else(processor, make_frames, write_video):
    random = np.random.default_rng(0)
    outcomes = set()
    for codec, container in (
        ("libx264", "mp4"),
        ("libvpx-vp9", "webm"),
        ("mpeg4", "avi"),
        ("libx264", "mpegts"),
    ):
        data = write_video(make_frames(5, 32, 32), 4, codec, container)
        for trial in range(20):
            hurt = bytearray(data[: random.integers(1, len(data) + 1)] if trial % 2 else data)
            for at in random.integers(0, len(hurt), 6):
                hurt[at] = random.integers(0, 256)
            try:
                outcomes.add(shown(processor, bytes(hurt))["kind"])
            except MediaError as error:
                outcomes.add(type(error).__name__)
    assert "video" in outcomes
    assert outcomes - {"video"} <= {"Undecodable", "Empty", "TooLarge"}


def test_spans_reach_over_the_times_and_forms_convert(processor, film, picture, special):
    sample = processor("a<video>b<image>", videos=[film], images=[picture])
    video, image = sample.spans
    assert (video.kind, image.kind) == ("video", "image")
    pads = sample.tokens == special["<|video_pad|>"]
    assert pads.sum() == sample.token_counts["video"] == 18
    assert np.flatnonzero(pads)[[0, -1]].tolist() == [video.start, video.end - 1]
    assert "<0.2 seconds>" in processor.decode(sample.tokens)
    assert "seconds>" in processor.decode(sample.tokens[video.start : video.end])
    assert sample.spans == processor.spans(sample.tokens, sample.media)
    short = processor.collapse(sample.tokens, sample.media)
    assert (short == special["<|video_pad|>"]).sum() == 1
    np.testing.assert_array_equal(processor.expand(short, sample.media), sample.tokens)
    with pytest.raises(SpanMismatch, match="pass the media"):
        processor.collapse(sample.tokens)
    bare = [{name: value for name, value in item.items() if name != "timestamps"} for item in sample.media]
    assert processor.spans(sample.tokens, bare) == sample.spans
    with pytest.raises(SpanMismatch, match="no timestamps"):
        processor.expand(short, bare)


def test_every_mismatch_of_a_video_names_it(processor, film, special):
    sample = processor("a<video>b", videos=[film])
    pad = special["<|video_pad|>"]
    first = int(np.flatnonzero(sample.tokens == pad)[0])
    for tokens in (np.delete(sample.tokens, first), sample.tokens[: first + 8]):
        with pytest.raises(SpanMismatch, match="18 video tokens in 3 runs of 6") as caught:
            processor.positions(tokens, sample.media)
        assert caught.value.item == "video 0"
    with pytest.raises(SpanMismatch, match="reserved_ids"):
        processor.spans(np.append(sample.tokens, pad), sample.media)
    changed = sample.tokens.copy()
    changed[first + 8] = changed[0]  # a time
    with pytest.raises(SpanMismatch, match="not what it is expanded to"):
        processor.collapse(changed, sample.media)
    with pytest.raises(SpanMismatch, match="behind a special token"):
        processor.expand([*processor.encode_text("a"), pad], sample.media)


def test_equal_videos_are_decoded_once(make_omni, make_frames, make_wave, write_video):
    film = write_video(make_frames(6), 4, container="matroska", sound=make_wave(1.0))
    omni = make_omni()
    first, again = omni("<video><video>", videos=[film, bytes(film)]).media
    assert first is again
    talking = omni("<video>", videos=[film], use_audio_in_video=True).media[0]
    assert talking is not first
    assert "input_features" in talking
    assert "input_features" not in first


def test_a_tokenizer_without_video_tokens_makes_a_model_of_images(make_tokenizer, film, picture):
    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    tokenizer = make_tokenizer(special=(*special, "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"))
    processor = OmniProcessor(tokenizer, family="qwen3_vl")
    assert processor("<image>", images=[picture]).token_counts.keys() == {"text", "image"}
    with pytest.raises(MediaError, match="takes text, image: use a model that takes videos"):
        processor("<video>", videos=[film])
