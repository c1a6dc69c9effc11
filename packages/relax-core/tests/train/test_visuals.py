"""What a micro-batch shows: each different picture once, where it stands, and the positions of its tokens."""

from typing import Any

import numpy as np
import pytest
import torch
from relax.backends.models import load_config
from relax.backends.train import visuals
from relax.backends.train.errors import BatchError
from relax.backends.train.visuals import Marks

IMAGE, VIDEO = 5, 6
MARKS = Marks(IMAGE, VIDEO, merge=2, values=4)


def image(height: int, width: int, seed: int = 0) -> dict:
    pixels = np.random.default_rng(seed).standard_normal((height * width, 4)).astype(np.float32)
    return {"kind": "image", "pixel_values": pixels, "image_grid_thw": np.asarray([[1, height, width]])}


def clip(time: int, height: int, width: int) -> dict:
    pixels = np.ones((time * height * width, 4), np.float32)
    return {
        "kind": "video",
        "pixel_values_videos": pixels,
        "video_grid_thw": np.asarray([[time, height, width]]),
    }


def test_positions_are_those_of_transformers(vision_folder):
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

    with torch.device("meta"):
        model: Any = Qwen3VLModel(load_config(vision_folder))
    # Text, an image of 2 x 3 tokens, text, two frames of 1 x 2, text, an image of one token at the end.
    ids = [9, 9, *[IMAGE] * 6, 9, 9, *[VIDEO] * 2, 9, *[VIDEO] * 2, 9, 9, 9, IMAGE]
    items = [image(4, 6), clip(2, 2, 4), image(2, 2)]
    tokens = torch.tensor(ids)
    expected, _ = model.get_rope_index(
        tokens[None],
        mm_token_type_ids=((tokens == IMAGE).int() + 2 * (tokens == VIDEO).int())[None],
        image_grid_thw=torch.tensor([[1, 4, 6], [1, 2, 2]]),
        video_grid_thw=torch.tensor([[2, 2, 4]]),
    )
    different, shown = visuals.read([tokens], [items], MARKS)
    runs = [run for one in shown for run in zip(one.runs, different[one.visual].frames, strict=True)]
    found = visuals.rope_positions(len(ids), sorted(runs), MARKS.merge)
    assert torch.equal(found, expected[:, 0])
    assert torch.equal(visuals.rope_positions(5, [], 2), torch.arange(5).expand(3, -1))


def test_each_different_picture_is_read_once_and_found_where_it_stands():
    first, second = image(2, 4, seed=1), image(2, 4, seed=2)
    again = {name: value.copy() if name != "kind" else value for name, value in first.items()}
    rows = [
        torch.tensor([9, IMAGE, IMAGE, 9, IMAGE, IMAGE]),
        torch.tensor([9, 9]),
        torch.tensor([IMAGE, IMAGE]),
    ]
    different, shown = visuals.read(rows, [[first, second], [], [again]], MARKS)
    assert len(different) == 2
    assert [(one.row, one.visual, one.runs) for one in shown] == [(0, 0, (1,)), (0, 1, (4,)), (2, 0, (0,))]
    assert visuals.places(shown[1], different[1], MARKS).tolist() == [4, 5]


def test_a_token_without_a_picture_behind_it_is_text():
    rows = [torch.tensor([9, IMAGE, 9, IMAGE, IMAGE, 9, VIDEO, 9, VIDEO, VIDEO, 9, VIDEO, VIDEO])]
    different, shown = visuals.read(rows, [[image(2, 4), clip(2, 2, 4)]], MARKS)
    assert [one.runs for one in shown] == [(3,), (8, 11)]
    assert [visual.kind for visual in different] == ["image", "video"]


@pytest.mark.parametrize(
    ("marks", "item", "message"),
    [
        (
            MARKS,
            clip(3, 2, 4),
            r"video 0 of row 0 needs a run of 2 video tokens \(id 6\), but the row has 4 for",
        ),
        (
            MARKS,
            image(4, 4),
            r"image 0 of row 0 needs a run of 4 image tokens \(id 5\), but the row has 2 for",
        ),
        (
            Marks(IMAGE, None, 2, 4),
            clip(1, 2, 4),
            r"needs a run of 2 video tokens \(id None\), but the row has 0",
        ),
        (MARKS, clip(1, 2, 4) | {"extra": np.zeros(1)}, "trains on images and videos"),
        (
            MARKS,
            image(2, 2) | {"image_grid_thw": np.asarray([1, 4, 4])},
            r"shape \(4, 4\).* means 16 patches of 4 numbers",
        ),
        (MARKS, image(2, 3), "width in multiples of 2 patches"),
        (MARKS, image(2, 2) | {"image_grid_thw": np.asarray([1, -2, -2])}, "above 0"),
        (MARKS, image(2, 2) | {"image_grid_thw": np.asarray([1, 2])}, "whole numbers"),
        (MARKS, image(2, 2) | {"image_grid_thw": np.asarray([1.0, 2, 2])}, "whole numbers"),
        (MARKS, image(2, 2) | {"pixel_values": np.zeros((4, 5), np.float32)}, "4 patches of 4 numbers"),
        (MARKS, image(2, 2) | {"pixel_values": np.full((4, 4), "a")}, "of <U1"),
    ],
)
def test_media_that_does_not_fit_is_refused(marks, item, message):
    rows = [torch.tensor([9, VIDEO, VIDEO, 9, VIDEO, VIDEO, 9, IMAGE, IMAGE])]
    for read in (visuals.read, visuals.require):
        with pytest.raises(BatchError, match=message):
            read(rows, [[item]], marks)
