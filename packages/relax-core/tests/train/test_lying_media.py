"""Grids, seconds and lengths that lie: refused by name, at once, without the memory they claim."""

from typing import Any

import numpy as np
import pytest
import torch
from relax.backends.train import omni, visuals
from relax.backends.train.errors import BatchError
from relax.backends.train.omni.placing import Reading

IMAGE, VIDEO, AUDIO = 5, 6, 7
MARKS = visuals.Marks(IMAGE, VIDEO, merge=2, values=4)
READING = Reading(IMAGE, VIDEO, AUDIO, merge=2, values=4, bins=3, window=50, rate=13)
OVERFLOWING = [
    [2**32, 2**32, 2],  # 2**65, of which int64 keeps 0
    [2**61, 2, 4],  # 2**64, likewise
    [2**40, 2**12, 2**12],
    [1, 2**62, 2],
    [2**62, 2, 2],
]


def seen(kind: str, grid: Any, patches: int, dtype: Any = np.int64, **more: Any) -> dict[str, Any]:
    pixels, name = ("pixel_values", "image") if kind == "image" else ("pixel_values_videos", "video")
    return {
        "kind": kind,
        pixels: np.zeros((patches, 4), np.float32),
        f"{name}_grid_thw": np.asarray([grid], dtype),
        **more,
    }


@pytest.mark.parametrize("grid", OVERFLOWING)
@pytest.mark.parametrize("kind", ["image", "video"])
@pytest.mark.parametrize("patches", [0, 8])
def test_grids_whose_product_is_more_than_a_number_holds(kind, grid, patches):
    rows = [torch.tensor([9, IMAGE, IMAGE, VIDEO, VIDEO])]
    with pytest.raises(BatchError, match="patches"):
        visuals.require(rows, [[seen(kind, grid, patches)]], MARKS)
    seconds = {"video_second_per_grid": np.ones(1)} if kind == "video" else {}
    with pytest.raises(BatchError, match="patches"):
        omni.require([rows[0].numpy()], [[seen(kind, grid, patches, **seconds)]], READING)


@pytest.mark.parametrize(
    ("grid", "dtype"),
    [
        ([-1, -2, 4], np.int64),
        ([0, 2, 4], np.int64),
        ([2**63 + 1, 2, 4], np.uint64),
        ([1.0, 2.0, 4.0], np.float64),
        ([np.nan, 2, 4], np.float32),
        (["1", "2", "4"], np.str_),
    ],
)
def test_grids_that_are_no_sizes(grid, dtype):
    rows = [torch.tensor([9, VIDEO, VIDEO])]
    item = seen("video", grid, 8, dtype)
    with pytest.raises(BatchError, match="video_grid_thw of row 0"):
        visuals.require(rows, [[item]], MARKS)
    with pytest.raises(BatchError, match="video_grid_thw of row 0"):
        omni.require([rows[0].numpy()], [[item | {"video_second_per_grid": np.ones(1)}]], READING)


@pytest.mark.parametrize("seconds", [1e30, 1e39, 2**24 / 13, np.nan, np.inf, 0.0, -1.0])
def test_seconds_that_lead_nowhere(seconds):
    item = seen("video", [2, 2, 4], 16, video_second_per_grid=np.array([seconds]))
    tokens = np.array([9, *[VIDEO] * 4])
    with pytest.raises(BatchError, match=r"video_second_per_grid of row 0|puts the last one at position"):
        omni.require([tokens], [[item]], READING)


@pytest.mark.parametrize("seconds", [1e-30, 0.37, 100_000.0])
def test_seconds_however_odd_give_positions_in_order(seconds):
    item = seen("video", [2, 2, 4], 16, video_second_per_grid=np.array([seconds]))
    tokens = np.array([9, *[VIDEO] * 4, 9])
    from relax.backends.train.omni.items import shown_in
    from relax.backends.train.omni.placing import place

    positions = place(0, tokens, shown_in(0, [item]), READING).positions
    assert np.isfinite(positions).all()
    assert (np.diff(positions[0]) >= 0).all()


@pytest.mark.parametrize(
    "lengths", [[9], [2.5], [float("nan")], [-1], [0], [2**62], [True], [], [2, 2], ["2"]]
)
def test_lengths_of_sounds_that_lie(lengths):
    item = {
        "kind": "audio",
        "input_features": np.zeros((1, 3, 8), np.float32),
        "audio_feature_lengths": np.asarray(lengths),
    }
    with pytest.raises(BatchError, match=r"audio_feature_lengths of row 0|has no frame"):
        omni.require([np.array([9, AUDIO, AUDIO])], [[item]], READING)


def test_masks_of_sounds_that_lie():
    mel = np.zeros((1, 3, 8), np.float32)
    for mask in (np.zeros((1, 8)), np.ones((1, 9)), np.ones((2, 8)), np.ones((1, 1, 8))):
        item = {"kind": "audio", "input_features": mel, "feature_attention_mask": mask}
        with pytest.raises(BatchError, match=r"feature_attention_mask of row 0|has no frame"):
            omni.require([np.array([9, AUDIO, AUDIO])], [[item]], READING)
