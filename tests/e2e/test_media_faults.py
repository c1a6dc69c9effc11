"""Runs with sound and video in which something goes wrong: rows, engines, memory, a stop in between."""

import io
import json
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import soundfile
from relax.distributed.bus import Sample

Local = Callable[..., Any]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
GROUPS, MEMBERS = 4, 4
SMALL = (
    "model=tiny_omni",
    f"rollout.prompts_per_step={GROUPS}",
    f"rollout.samples_per_prompt={MEMBERS}",
    "actor.micro_batch_size=4",
    "rollout.max_new_tokens=24",
    "actor.supervised.steps=2",
    "actor.supervised.batch_size=4",
    "data.answer_column=answer",
    "data.image_column=images",
    "data.audio_column=audios",
    "data.video_column=videos",
    "rollout.stall_seconds=10",
)
COLUMNS = {"audios": "audio", "videos": "video", "images": "image"}


def _sound(seconds: float, pitch: float) -> bytes:
    target = io.BytesIO()
    wave = 0.4 * np.sin(2 * np.pi * pitch * np.arange(round(16000 * seconds)) / 16000)
    soundfile.write(target, wave.astype(np.float32), 16000, format="WAV")
    return target.getvalue()


def _film(level: int, frames: int = 8) -> bytes:
    target = io.BytesIO()
    with av.open(target, "w", format="matroska") as file:
        stream: Any = file.add_stream("libx264", rate=8)
        stream.height, stream.width, stream.pix_fmt = 32, 64, "yuv420p"
        for number in range(frames):
            shade = np.full((32, 64, 3), (level + 8 * number) % 256, np.uint8)
            file.mux(stream.encode(av.VideoFrame.from_ndarray(shade, format="rgb24")))
        file.mux(stream.encode(None))
    return target.getvalue()


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """rows(n, broken=...): n rows of every kind in turn, those from `broken` on every third damaged."""
    folder = tmp_path_factory.mktemp("media")
    for number in range(4):
        (folder / f"{number}.wav").write_bytes(_sound(0.2 + 0.3 * number, 200.0 * (number + 1)))
        (folder / f"{number}.mkv").write_bytes(_film(30 * number))
    (folder / "bad.mkv").write_bytes(_film(7)[:300])
    from PIL import Image

    Image.new("RGB", (64, 32), "orange").save(folder / "a.png")
    picture = str(folder / "a.png")

    def made(count: int, broken: int | None = None) -> Path:
        found = []
        for number in range(count):
            sound, film = str(folder / f"{number % 4}.wav"), str(folder / f"{number % 4}.mkv")
            row = [
                {"prompt": f"{number}<audio>", "audios": [sound], "videos": [], "images": []},
                {
                    "prompt": f"{number}<video><audio><image>",
                    "audios": [sound],
                    "videos": [film],
                    "images": [picture],
                },
                {"prompt": f"{number}", "audios": [], "videos": [], "images": []},
                {"prompt": f"{number}<video>", "audios": [], "videos": [film], "images": []},
            ][number % 4]
            if broken is not None and number >= broken and number % 3 == 0:
                row = row | {
                    "prompt": f"{number}<video>",
                    "videos": [str(folder / "bad.mkv")],
                    "audios": [],
                    "images": [],
                }
            found.append(row | {"answer": "77"})
        path = folder / f"{count}-{broken}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in found))
        return path

    return made


def exact(run: Any, steps: int, put: list[Sample]) -> None:
    """Each prompt in order was trained by one step, each of its samples once, with what its row shows."""
    trained = [ordinal for _, group in run.trained() for ordinal in group]
    assert len(trained) == len(set(trained)) == steps * GROUPS
    assert all(accounts["faults"] == [] for accounts in run.accounting)
    assert Counter((sample.ordinal, sample.member) for sample in put).most_common(1)[0][1] == 1
    text = {2: (), 0: ("audio",), 1: ("video", "audio", "image"), 3: ("video",)}
    kinds = Counter(tuple(item["kind"] for item in sample.media) for sample in put)
    assert set(kinds) <= set(text.values())
    assert len(kinds) == 4


def test_engines_that_die_and_stall_with_media_in_flight_lose_nothing(
    local: Local, put: list[Sample], rows: Callable[..., Path], plan: Any
) -> None:
    plan.faults = deque([("dies", 15), ("stalls", 10), ("dies", 25)])
    words = (*SMALL, f"data.path={rows(64)}", "rollout.engine=breaking_engine:BreakingEngine", "steps=5")
    run = local("quickstart", *words)
    exact(run, 5, put)
    assert not plan.faults
    lost = [event for event in run.lines("events.jsonl") if event["event"] == "engine lost"]
    assert len(lost) == 3
    assert max(m["loss/ratio_gap_max"] for m in run.metrics if m["staleness/max"] == 0) <= 1e-4


def test_partial_rollouts_with_media_cross_updates(
    local: Local, put: list[Sample], rows: Callable[..., Path]
) -> None:
    words = (*SMALL, f"data.path={rows(64)}", "max_staleness=2", "steps=6", "rollout.replicas=1")
    run = local("quickstart", *words)
    exact(run, 6, put)
    crossed = [sample for sample in put if len(sample.policy_versions) > 1]
    assert any(sample.media for sample in crossed), "no sample with media crossed an update"
    for sample in crossed:
        spans = np.asarray(sample.policy_versions)
        assert (np.diff(spans[:, 0]) > 0).all()
        assert spans[-1, 2] <= len(sample.loss_mask)


def test_damaged_media_drop_their_groups_by_name_and_a_resume_goes_on(
    local: Local, put: list[Sample], rows: Callable[..., Path]
) -> None:
    words = (*SMALL, f"data.path={rows(64, broken=34)}", "mode=colocate", "max_staleness=0")
    whole = local("quickstart", *words, "steps=8", name="whole")
    told = [event for event in whole.lines("events.jsonl") if event["event"] == "group dropped"]
    assert told
    assert all("video 0" in event["reason"] and "bad.mkv" in event["reason"] for event in told)
    exact(whole, 8, put)
    local("quickstart", *words, "steps=4", name="parts")
    parts = local("quickstart", "steps=8", name="parts", resume=True)
    # A resume tries once more what was dropped, so that other groups are in a batch with what is left.
    assert parts.trained() == whole.trained()
    assert parts.rewards == pytest.approx(whole.rewards, rel=1e-4)
    again = local("quickstart", *words, "steps=8", name="again", replay=whole)
    assert again.untimed == whole.untimed


def test_a_queue_that_holds_little_more_than_a_step_of_media_is_waited_for(
    local: Local, put: list[Sample], rows: Callable[..., Path]
) -> None:
    words = (*SMALL, f"data.path={rows(64)}", "max_staleness=2")
    local("quickstart", *words, "steps=2", name="measured")
    largest = max(
        sum(value.nbytes for item in sample.media for value in item.values() if isinstance(value, np.ndarray))
        for sample in put
    )
    put.clear()
    limit = GROUPS * (largest + MEMBERS * 2048)  # one step of the largest rows, where three may be under way
    run = local(
        "quickstart", *words, "steps=5", f"queue.max_bytes={limit}", "queue.wait_seconds=60", name="full"
    )
    exact(run, 5, put)
