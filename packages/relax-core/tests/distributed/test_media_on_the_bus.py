"""What samples show comes back from the bus as it was: every kind, in order, for groups and single rows."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from relax import schema
from relax.distributed.bus import Bus, Endpoint, columns
from relax.distributed.media import MediaError, fields_of, media_of

Config = Callable[..., Any]
Group = Callable[..., Any]
Queue = Callable[..., Endpoint]

random = np.random.default_rng(0)


def image(height: int = 2, width: int = 4) -> dict[str, Any]:
    return {
        "kind": "image",
        "pixel_values": random.random((height * width, 6), np.float32),
        "image_grid_thw": np.array([[1, height, width]], np.int64),
    }


def video(time: int = 2, seconds: float | None = 1.0) -> dict[str, Any]:
    item = {
        "kind": "video",
        "pixel_values_videos": random.random((time * 8, 6), np.float32),
        "video_grid_thw": np.array([[time, 2, 4]], np.int64),
        "file": random.integers(0, 255, 50, np.uint8),
    }
    return item if seconds is None else item | {"video_second_per_grid": np.array([seconds], np.float32)}


def sound(frames: int = 30) -> dict[str, Any]:
    return {
        "kind": "audio",
        "input_features": random.random((1, 5, frames), np.float32),
        "feature_attention_mask": np.ones((1, frames), np.int64),
        "file": random.integers(0, 255, 50, np.uint8),
    }


def talk() -> dict[str, Any]:
    return {**sound(70), **video(3), "kind": "video"}


def assert_same(found: list[dict[str, Any]], put: Any) -> None:
    assert [item["kind"] for item in found] == [item["kind"] for item in put]
    for mine, theirs in zip(found, put, strict=True):
        assert mine.keys() == theirs.keys() - {"file"}
        for name in mine.keys() - {"kind"}:
            assert mine[name].dtype == theirs[name].dtype
            np.testing.assert_array_equal(mine[name], theirs[name])


LAYOUTS = {
    "nothing": lambda: [],
    "images": lambda: [image(), image(4, 6)],
    "a sound": lambda: [sound()],
    "sounds of different length": lambda: [sound(30), sound(80), sound(11)],
    "a video without seconds": lambda: [video(2, None), image(), video(1, None)],
    "a video with its sound before a sound": lambda: [talk(), sound(20)],
    "a sound before a video with its sound": lambda: [sound(20), talk(), image(), video(), talk()],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shared", [True, False])
async def test_items_come_back_in_their_order(
    config: Config, group: Group, queue: Queue, layout: str, shared: bool
) -> None:
    bus = await Bus.connect(queue(), config(), media=True)
    try:
        same = LAYOUTS[layout]()
        put = [same if shared else LAYOUTS[layout]() for _ in range(2)]
        samples = [replace(one, media=media) for one, media in zip(group(0), put, strict=True)]
        plain = group(1)  # shows nothing: all its media fields are None
        for number, members in enumerate((samples, plain)):
            ids = await bus.put_group(members, step=number)
            await bus.partition.update(ids, {"advantages": [np.zeros(5, np.float32)] * 2})
        batch = await bus.groups(schema.TASK_ACTOR, 2, most=2, least=2, timeout=10)
        found = [media_of(batch, row) for row in range(4)]
        await batch.ack()
        for mine, theirs in zip(found, [*put, [], []], strict=True):
            assert_same(mine, theirs)
    finally:
        await bus.close()


def test_a_group_shares_one_copy_and_files_stay_behind(group: Group) -> None:
    media = [talk(), image()]
    fields, shared = columns([replace(one, media=media) for one in group(0)], media=True)
    assert schema.MEDIA_FIELDS[0] == schema.MEDIA_ORDER
    assert set(shared) == set(schema.MEDIA_FIELDS)
    assert all(len(arrays) == 1 for arrays, _ in shared.values())
    assert not any("file" in name for name in (*fields, *shared))
    fields, shared = columns([replace(one, media=[image()]) for one in group(0)], media=True)
    assert not shared
    assert fields["media/input_features"] == [None, None]
    assert all(len(fields[name]) == 2 for name in schema.MEDIA_FIELDS)


def test_what_the_bus_does_not_carry_is_named() -> None:
    with pytest.raises(MediaError, match="of kind 'smell'; the bus carries image, video, audio"):
        fields_of([{"kind": "smell"}])
    with pytest.raises(MediaError, match="media/depth; the bus carries media/order"):
        fields_of([image() | {"depth": np.zeros((1, 2))}])
