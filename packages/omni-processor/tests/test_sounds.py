"""Every shape of a sound's source gives the same item, and what is no sound is refused by name."""

import base64
import io
from types import SimpleNamespace

import numpy as np
import pytest
import soundfile
from omni_processor import (
    Empty,
    Limits,
    MediaError,
    MessageError,
    SourceNotAllowed,
    SpanMismatch,
    TooLarge,
    Undecodable,
    UnsupportedModality,
)


@pytest.fixture
def wave(make_wave):
    """0.8 s that 16 bits hold exactly."""
    return np.rint(make_wave(0.8) * 32767).astype(np.int16)


def heard(omni, source):
    return omni("<audio>", audios=[source]).media[0]


def part(**content):
    return [{"role": "user", "content": [{"type": "text", "text": "hear "}, content]}]


def test_every_shape_of_a_sound_part_gives_the_same_sample(omni, wave, write_sound, tmp_path):
    torch = pytest.importorskip("torch")
    data = write_sound(wave, subtype="PCM_16")
    path = tmp_path / "a b.wav"
    path.write_bytes(data)
    encoded = base64.b64encode(data).decode()
    floats = wave / np.float32(32768)
    expected = omni(part(type="audio", audio=path))
    assert bytes(expected.media[0]["file"]) == data
    for content in (
        {"type": "audio_url", "audio_url": {"url": path.as_uri()}},
        {"type": "audio_url", "audio_url": str(path)},
        {"type": "input_audio", "input_audio": {"data": encoded, "format": "wav"}},
        {"type": "input_audio", "input_audio": {"data": encoded, "format": None}},
        {"type": "audio", "path": str(path), "audio": None},
        {"type": "audio", "bytes": data},
        {"type": "audio", "base64": encoded},
        {"type": "audio", "url": f"data:audio/wav;base64,{encoded}"},
        {"type": "audio", "audio": {"bytes": data, "path": None}},
        {"type": "audio", "audio": {"array": floats, "sampling_rate": 16000}},
        {"type": "audio", "audio": {"array": floats.astype(np.float64), "sampling_rate": 16000}},
        {"type": "audio", "audio": {"array": wave, "sampling_rate": 16000.0}},
        {"type": "audio", "audio": {"array": floats.tolist(), "sampling_rate": 16000}},
        {"type": "audio", "audio": floats},
        {"type": "audio", "audio": torch.from_numpy(floats)},
        {"type": "audio", "audio": torch.from_numpy(np.stack([floats, floats]))},
        {"audio": path},
    ):
        sample = omni(part(**content))
        np.testing.assert_array_equal(sample.tokens, expected.tokens)
        found, wanted = sample.media[0]["input_features"], expected.media[0]["input_features"]
        np.testing.assert_array_equal(found, wanted)
    for sample in (
        omni(part(type="audio"), audios=[path]),
        omni([{"role": "user", "content": "hear <audio>"}], audios=[path]),
    ):
        np.testing.assert_array_equal(sample.tokens, expected.tokens)


def test_a_decoded_datasets_cell_is_read(omni, wave):
    torch = pytest.importorskip("torch")
    floats = torch.from_numpy(wave / np.float32(32768))[None]
    decoder = SimpleNamespace(get_all_samples=lambda: SimpleNamespace(data=floats, sample_rate=16000))
    np.testing.assert_array_equal(
        heard(omni, decoder)["input_features"], heard(omni, floats[0].numpy())["input_features"]
    )


@pytest.mark.parametrize(
    ("container", "subtype", "tolerance"),
    [
        ("FLAC", "PCM_16", 1e-6),
        ("AIFF", "PCM_16", 1e-6),
        ("WAV", "PCM_24", 1e-6),
        ("WAV", "FLOAT", 1e-6),
        ("CAF", "PCM_16", 1e-6),
        ("NIST", "PCM_16", 1e-6),
        ("OGG", "VORBIS", 0.5),
        ("MP3", "MPEG_LAYER_III", 0.7),
    ],
)
def test_formats_of_libsndfile_are_heard(omni, wave, write_sound, container, subtype, tolerance):
    data = write_sound(wave / np.float32(32768), container=container, subtype=subtype)
    item, expected = heard(omni, data), heard(omni, wave)
    assert abs(item["input_features"].shape[2] - expected["input_features"].shape[2]) <= 8
    width = min(item["input_features"].shape[2], expected["input_features"].shape[2])
    difference = item["input_features"][..., 5 : width - 5] - expected["input_features"][..., 5 : width - 5]
    assert np.abs(difference).mean() <= tolerance


def test_the_sound_of_a_video_is_heard_as_a_sound(omni, wave, make_frames, write_video):
    for container in ("matroska", "mp4", "mov", "avi"):
        film = write_video(make_frames(8), 10, container=container, sound=wave / np.float32(32767))
        item = heard(omni, film)
        np.testing.assert_array_equal(item["input_features"], heard(omni, wave)["input_features"])
        assert bytes(item["file"]) == film


def test_channels_are_averaged_and_rates_brought_to_the_models(omni, make_wave, write_sound):
    left, right = make_wave(1.0, 48000), make_wave(1.0, 48000, seed=1)
    data = write_sound(np.stack([left, right]), 48000)
    item = heard(omni, data)
    assert item["input_features"].shape == (1, 128, 100)
    soxr = pytest.importorskip("soxr")
    mono = soxr.resample((left + right) / 2, 48000, 16000, quality="HQ")
    assert np.abs(item["input_features"] - heard(omni, mono)["input_features"]).max() <= 1e-4
    odd = heard(omni, {"array": make_wave(1.0, 11025), "sampling_rate": 11025})
    assert odd["input_features"].shape[2] == 100
    assert omni.plan({"array": make_wave(1.0, 11025), "sampling_rate": 11025}, "audio").tokens == 13


def test_the_file_of_an_array_holds_it_bit_for_bit(omni, wave):
    for array, subtype in ((wave, "PCM_16"), (wave / np.float32(32768), "FLOAT")):
        file = heard(omni, {"array": np.stack([array, array[::-1]]), "sampling_rate": 22050})["file"]
        assert file.dtype == np.uint8
        with soundfile.SoundFile(io.BytesIO(bytes(file))) as written:
            assert (written.samplerate, written.channels, written.subtype) == (22050, 2, subtype)
            read = written.read(dtype="int16" if subtype == "PCM_16" else "float32")
        np.testing.assert_array_equal(read.T, np.stack([array, array[::-1]]))


def test_equal_sounds_are_made_once_and_arrays_are_read_only(make_omni, wave):
    omni = make_omni()
    first, again, other = omni("<audio><audio><audio>", audios=[wave, wave.copy(), wave[::-1]]).media
    assert first is again
    assert first is not other
    assert not any(
        first[name].flags.writeable for name in ("input_features", "feature_attention_mask", "file")
    )


@pytest.mark.parametrize(
    ("source", "kind", "reason"),
    [
        ("https://example.com/a.wav", SourceNotAllowed, "not fetched here"),
        ("/nowhere/a.wav", Undecodable, "cannot be opened"),
        ("", Empty, "empty string"),
        (b"", Empty, "zero bytes"),
        (b"RIFF\x24\x00\x00\x00WAVEfmt ", Undecodable, "not a sound in a container"),
        (b"no sound at all, " * 40, Undecodable, "not a sound in a container"),
        (b"<!DOCTYPE html><html></html>", Undecodable, "HTML page"),
        (b"#EXTM3U\n#EXTINF:1,\nfile:///etc/hostname\n", Undecodable, "not a sound in a container"),
        (b"ffconcat version 1.0\nfile /etc/hostname\n", Undecodable, "not a sound in a container"),
        (np.zeros(0, np.float32), Empty, "no samples"),
        (np.zeros(80, np.float32), Empty, "hears nothing in less than"),
        (np.zeros((2, 3, 4), np.float32), Undecodable, r"\[channels, samples\]"),
        (np.zeros((400, 2), np.float32), Undecodable, "transpose"),
        (np.zeros(400, np.int64), Undecodable, "int64 is no type of samples"),
        (np.full(400, np.nan, np.float32), Undecodable, "not finite"),
        ({"array": np.zeros(400)}, Undecodable, "sampling_rate is None"),
        ({"array": np.zeros(400), "sampling_rate": 0}, Undecodable, "sampling_rate is 0"),
        ({"path": None}, Empty, 'needs "bytes" or "path"'),
        (3, SourceNotAllowed, "cannot read a sound from int"),
    ],
)
def test_what_is_no_sound_is_refused_by_name(omni, source, kind, reason):
    with pytest.raises(kind, match=reason) as caught:
        omni("<audio>", audios=[source])
    assert caught.value.item == "audio 0"


def test_limits_are_held_before_decoding(make_omni, make_wave, write_sound):
    data = write_sound(make_wave(3.0))
    with pytest.raises(TooLarge, match=r"3\.0 s long, the limit is 2 s"):
        make_omni(limits=Limits(max_seconds=2)).plan(data, "audio")
    with pytest.raises(TooLarge, match="max_stream_bytes"):
        make_omni(limits=Limits(max_stream_bytes=1000)).plan(data, "audio")
    with pytest.raises(TooLarge, match="max_seconds"):
        make_omni(limits=Limits(max_seconds=2)).plan(make_wave(3.0), "audio")
    # Almost an hour at a rate that no sound has: two thousand million samples in a few bytes of header.
    bomb = _longer(write_sound(np.zeros(400, np.float32), 655_350, "FLAC", "PCM_16"), 2**31)
    with pytest.raises(TooLarge, match="samples over all channels"):
        make_omni().plan(bomb, "audio")


def _longer(flac: bytes, samples: int) -> bytes:
    """A FLAC file whose header claims more samples (STREAMINFO's 36 bits of them)."""
    made = bytearray(flac)
    made[21] = made[21] & 0xF0 | (samples >> 32)
    made[22:26] = (samples & 0xFFFFFFFF).to_bytes(4, "big")
    return bytes(made)


def test_a_cut_off_sound_says_how_much_of_it_is_there(omni, wave, write_sound):
    for container in ("FLAC", "WAV"):
        data = write_sound(wave / np.float32(32768), container=container, subtype="PCM_16")
        with pytest.raises(Undecodable, match="cut off"):
            heard(omni, data[: len(data) // 2])
    streamed = bytearray(write_sound(wave / np.float32(32768), subtype="PCM_16"))
    at = streamed.index(b"data")
    streamed[4:8] = streamed[at + 4 : at + 8] = b"\xff" * 4  # written by who did not know the length
    assert heard(omni, bytes(streamed))["input_features"].shape[2] == 80


def test_damaged_sounds_are_sounds_or_media_errors_and_nothing_else(
    omni, make_wave, write_sound, write_video
):

    random = np.random.default_rng(0)
    whole = [
        write_sound(make_wave(0.3), container=container, subtype=subtype)
        for container, subtype in (("WAV", "PCM_16"), ("FLAC", "PCM_16"), ("OGG", "VORBIS"))
    ]
    whole.append(
        write_video(np.zeros((4, 32, 32, 3), np.uint8), 10, container="matroska", sound=make_wave(0.3))
    )
    outcomes = set()
    for data in whole:
        for trial in range(25):
            hurt = bytearray(data[: random.integers(1, len(data) + 1)] if trial % 2 else data)
            for at in random.integers(0, len(hurt), 6):
                hurt[at] = random.integers(0, 256)
            try:
                outcomes.add(heard(omni, bytes(hurt))["kind"])
            except MediaError as error:
                outcomes.add(type(error).__name__)
    assert "audio" in outcomes
    assert outcomes - {"audio"} <= {"Undecodable", "Empty", "TooLarge"}


def test_marks_and_sounds_must_be_as_many(omni, wave):
    with pytest.raises(SpanMismatch, match=r"asks for 1 audios .* audios= holds 2"):
        omni("<audio>", audios=[wave, wave])
    with pytest.raises(SpanMismatch, match="asks for 2 audios"):
        omni("<audio><audio>", audios=[wave])
    with pytest.raises(MessageError, match="audios= must be a list"):
        omni("<audio>", audios=wave)
    with pytest.raises(MessageError, match="audio part of message 0 has no source"):
        omni([{"role": "user", "content": [{"type": "audio"}]}])
    assert omni.decode(omni("<audio>").tokens) == "<audio>"  # a column that was not given has no marks


def test_models_that_do_not_hear_say_so(processor, text_processor, wave, make_frames, write_video):
    with pytest.raises(UnsupportedModality, match="takes text, image, video: use a model that takes audios"):
        processor("<audio>", audios=[wave])
    with pytest.raises(UnsupportedModality, match="reads text only"):
        text_processor("<audio>", audios=[wave])
    film = write_video(make_frames(4), 4, container="matroska", sound=wave / np.float32(32767))
    with pytest.raises(UnsupportedModality, match="qwen3_vl hears none"):
        processor("<video>", videos=[film], use_audio_in_video=True)
