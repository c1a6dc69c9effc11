"""What a warm-up imitates; rows that make no demonstration are left out and told of."""

from typing import Any

import numpy as np
import pytest
from omni_processor import OmniProcessor
from PIL import Image
from relax.backends.tiny import write_tiny
from relax.components.warm_up import Demonstrations, NoDemonstration, demonstrate
from relax.config.base import ConfigError
from relax.config.inputs import DataSettings
from relax.engine.prompts import Prompt, PromptSource
from relax.ops.reports import Reports

FRAMES = np.random.default_rng(0).integers(0, 255, (4, 32, 64, 3)).astype(np.uint8)


@pytest.fixture(scope="module")
def processor(tmp_path_factory: pytest.TempPathFactory) -> OmniProcessor:
    return OmniProcessor.from_pretrained(write_tiny(tmp_path_factory.mktemp("model"), kind="qwen3_vl"))


def row(prompt: str, answer: Any = "77", videos: Any = (), images: Any = ()) -> dict[str, Any]:
    return {"prompt": prompt, "answer": answer, "videos": list(videos), "images": list(images)}


def demonstrations(rows: list[Any], processor: OmniProcessor) -> tuple[Demonstrations, Reports]:
    settings = DataSettings(
        path="rows", shuffle=False, answer_column="answer", video_column="videos", image_column="images"
    )
    source = PromptSource(rows, settings, seed=0)
    reports = Reports("actor")
    return Demonstrations(source, processor, object(), reports), reports


def test_rows_with_and_without_media_are_imitated_in_their_order(processor: OmniProcessor) -> None:
    picture = Image.new("RGB", (64, 32), "orange")
    rows = [
        row("<image>then<video>", videos=[FRAMES], images=[picture]),
        row("nothing"),
        row("<video>", videos=[FRAMES]),
    ]
    found, _ = demonstrations(rows, processor)
    kinds = {
        tuple(item["kind"] for item in one.media) for one in found.drawn(np.random.default_rng(0), 20, 0)
    }
    assert kinds == {("image", "video"), (), ("video",)}


def test_bad_rows_are_left_out_told_once_and_another_is_drawn(processor: OmniProcessor) -> None:
    rows = [
        row("good <video>", videos=[FRAMES]),
        row("<video>", videos=[b"no video"]),
        row("<video><video>", videos=[FRAMES]),
        row("no answer", answer=None),
        row("also good"),
    ]
    found, reports = demonstrations(rows, processor)
    draw = np.random.default_rng(1)
    drawn = [one for _ in range(6) for one in found.drawn(draw, 8, max_failures=3)]
    assert len(drawn) == 48
    assert {len(one.media) for one in drawn} == {0, 1}
    told = {report.data["ordinal"]: report.data["reason"] for report in reports.drain()}
    assert told.keys() == {1, 2, 3}
    assert "video 0" in told[1]
    assert "more <video> placeholders than videos" in told[2]
    assert "row-3 has no answer to imitate" in told[3]


def test_too_many_bad_rows_in_a_row_end_the_warm_up_by_name(processor: OmniProcessor) -> None:
    bad = row("<video>", videos=[b"no video"])
    for rows, most in (([bad] * 100, 4), ([bad, bad], 10)):
        found, _ = demonstrations(rows, processor)
        with pytest.raises(ConfigError, match=r"rollout.max_failures = \d+\); the last one: video 0"):
            found.drawn(np.random.default_rng(0), 4, most)


def test_what_is_no_finite_number_is_no_demonstration(processor: OmniProcessor, monkeypatch: Any) -> None:
    from relax.components import warm_up
    from relax.engine.policy import shown as whole

    def broken(sample: Any) -> list[dict[str, Any]]:
        items = whole(sample)
        for item in items:
            item["pixel_values_videos"] = item["pixel_values_videos"].copy()
            item["pixel_values_videos"][3, 5] = np.nan
        return items

    monkeypatch.setattr(warm_up, "shown", broken)
    messages = [{"role": "user", "content": [{"type": "video", "video": FRAMES}]}]
    prompt = Prompt(0, "row-0", messages, "77", {})
    with pytest.raises(
        NoDemonstration, match="media item 0 of row-0 has pixel_values_videos that are no finite"
    ):
        demonstrate(processor, object(), prompt)
