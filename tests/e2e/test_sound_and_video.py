"""Runs whose data is seen moving and heard: from files through
processor, engine, bus and reference to the trainer.
"""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import soundfile
from relax.config import ConfigError
from relax.distributed.bus import Sample

Local = Callable[..., Any]
SHIM = Path(__file__).parents[2] / "packages/relax-core/tests/train/megatron/shim"
"""Lets megatron-core compute on CPUs."""
SMALL = (
    "rollout.prompts_per_step=4",
    "rollout.samples_per_prompt=2",
    "actor.micro_batch_size=4",
    "rollout.max_new_tokens=4",
    "actor.supervised.steps=2",
    "actor.supervised.batch_size=4",
    "data.answer_column=answer",
    "steps=2",
)


def _tone(pitch: float, seconds: float) -> np.ndarray:
    return (0.4 * np.sin(2 * np.pi * pitch * np.arange(round(16000 * seconds)) / 16000)).astype(np.float32)


def _film(path: Path, level: int, sound: np.ndarray) -> None:
    """A second of frames that grow brighter, with a sound track."""
    target = io.BytesIO()
    with av.open(target, "w", format="matroska") as file:
        stream: Any = file.add_stream("libx264", rate=8)
        stream.height, stream.width, stream.pix_fmt = 32, 64, "yuv420p"
        track: Any = file.add_stream("pcm_s16le", rate=16000)
        track.layout = "mono"
        for number in range(8):
            frame = np.full((32, 64, 3), level + 8 * number, np.uint8)
            file.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        file.mux(stream.encode(None))
        made = av.AudioFrame.from_ndarray((sound * 32767).astype(np.int16)[None], format="s16", layout="mono")
        made.sample_rate = 16000
        file.mux(track.encode(made))
        file.mux(track.encode(None))
    path.write_bytes(target.getvalue())


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of every kind: a sound, two sounds, a video, a video and a sound, pictures, none."""
    folder = tmp_path_factory.mktemp("media")
    for number in range(4):
        soundfile.write(folder / f"{number}.wav", _tone(200 * (number + 1), 0.2 + 0.1 * number), 16000)
        _film(folder / f"{number}.mkv", 30 * number, _tone(300 * (number + 1), 1.0))
    from PIL import Image

    Image.new("RGB", (64, 32), "orange").save(folder / "a.png")
    sound, film, picture = (
        lambda n: str(folder / f"{n}.wav"),
        lambda n: str(folder / f"{n}.mkv"),
        str(folder / "a.png"),
    )
    rows = [
        {"prompt": "<audio>low?", "audios": [sound(0)], "videos": [], "images": []},
        {"prompt": "<audio>or<audio>?", "audios": [sound(1), sound(2)], "videos": [], "images": []},
        {"prompt": "bright?", "audios": [], "videos": [film(0)], "images": []},
        {"prompt": "<video>then<audio>", "audios": [sound(3)], "videos": [film(1)], "images": []},
        {"prompt": "<audio>is<image>", "audios": [sound(0)], "videos": [], "images": [picture]},
        {"prompt": "<image><video>?", "audios": [], "videos": [film(2)], "images": [picture]},
        {"prompt": "nothing", "audios": [], "videos": [], "images": []},
        {"prompt": "<video><video>", "audios": [], "videos": [film(3), film(0)], "images": []},
    ]
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({**row, "answer": "77"}) + "\n" for row in rows))
    return path


def shown(data: Path, *more: str) -> tuple[str, ...]:
    return (
        *SMALL,
        f"data.path={data}",
        "data.image_column=images",
        "data.audio_column=audios",
        "data.video_column=videos",
        *more,
    )


@pytest.mark.parametrize("own_sound", [False, True])
def test_sound_and_video_flow_from_the_data_to_the_trainer(
    local: Local, put: list[Sample], data: Path, own_sound: bool
) -> None:
    words = ("model=tiny_omni", "algorithm.kl_coef=0.1", f"data.audio_in_video={own_sound}")
    run = local("quickstart", *shown(data, *words))
    assert len(run.metrics) == 2
    kinds = {tuple(item["kind"] for item in sample.media) for sample in put}
    assert kinds == {
        *(("audio",), ("audio", "audio"), ("video",), ("video", "audio"), ("audio", "image")),
        *(("image", "video"), (), ("video", "video")),
    }
    films = [item for sample in put for item in sample.media if item["kind"] == "video"]
    assert all(("input_features" in item) == own_sound for item in films)
    assert not any({"file", "timestamps"} & item.keys() for item in films)  # no engine or trainer takes them
    # Engine and trainer saw and heard the same at step 0, which is on-policy.
    assert run.metrics[0]["loss/ratio_gap_max"] <= 1e-4
    assert run.accounting[0]["faults"] == []


def test_a_model_that_sees_is_shown_videos_and_a_replay_repeats_the_run(
    local: Local, put: list[Sample], tmp_path: Path, data: Path
) -> None:
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    seen = tmp_path / "seen.jsonl"
    seen.write_text("".join(json.dumps(row) + "\n" for row in rows if not row["audios"]))
    columns = ("data.image_column=images", "data.video_column=videos")
    words = (*SMALL, f"data.path={seen}", *columns, "model=tiny_vl")
    run = local("quickstart", *words)
    assert {tuple(item["kind"] for item in sample.media) for sample in put} == {
        *(("video",), ("image", "video"), (), ("video", "video"))
    }
    assert run.metrics[0]["loss/ratio_gap_max"] <= 1e-4
    again = local("quickstart", *words, name="again", replay=run)
    assert again.untimed == run.untimed


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_megatron_hears_and_sees_what_the_data_holds_and_follows_its_routes(
    command: Callable[..., Any], data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(SHIM))
    ranks = (
        *("actor.backend=megatron", "actor.tensor_parallel=2", "actor.megatron.sequence_parallel=true"),
        "actor.routing_replay=true",
    )
    still = ("actor.supervised.steps=0", "actor.freeze=[vision, audio]", "ray.start_seconds=300")
    words = shown(data, "model=tiny_omni", *ranks, *still)
    run = command("train", "configs/quickstart.yaml", *words, "launcher=local", "log.progress=plain").finish(
        timeout=500
    )
    assert run.code == 0, run.output
    assert len(run.metrics) == 2
    assert run.metrics[0]["loss/ratio_gap_max"] <= 1e-4


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (("model=tiny_vl",), "data.audio_column = 'audios' with model.path = 'tiny_vl' .*does not hear"),
        (("model=tiny",), "data.image_column = 'images' with model.path = 'tiny' .*does not see images"),
        (("model=tiny_omni", "data.audio_column=sounds"), "data.audio_column = 'sounds': .*no such column"),
        (
            ("model=tiny_omni", "model.text_only=true"),
            "text_only = true with data.audio_column = 'audios'",
        ),
        (
            ("model=tiny_omni", "data.audio_in_video=true", "data.video_column=null"),
            "audio_in_video = true without data.video_column",
        ),
    ],
)
def test_what_a_model_cannot_take_is_said_before_anything_starts(
    local: Local, data: Path, words: tuple[str, ...], fault: str
) -> None:
    with pytest.raises(ConfigError, match=fault):
        local("quickstart", *shown(data, *words))
