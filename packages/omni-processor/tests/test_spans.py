"""Placeholders against items: conversions between the two forms, positions, batches, and every mismatch."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omni_processor import Span, SpanMismatch, collate


@pytest.fixture
def two(processor, picture):
    """A sample with images of 12 and 8 tokens."""
    return processor("a <image> b <image> c", images=[picture, picture.resize((256, 32))])


def test_collapse_and_expand_are_inverse(processor, two, special):
    short = processor.collapse(two.tokens)
    assert (short == special["<|image_pad|>"]).sum() == 2
    assert short.dtype == np.int32
    np.testing.assert_array_equal(processor.expand(short, two.media), two.tokens)
    np.testing.assert_array_equal(processor.collapse(two.tokens, two.media), short)


@settings(max_examples=60, deadline=None)
@given(layout=st.lists(st.one_of(st.sampled_from([0, 1]), st.integers(10, 60)), max_size=30))
def test_any_layout_of_items_survives_the_round_trip(processor, special, layout):
    """0 and 1 are items of 12 and 8 tokens, also side by side; anything else is a text token."""
    media = [
        {"kind": "image", "image_grid_thw": np.array([[1, 6, 8] if kind == 0 else [1, 2, 16]])}
        for kind in layout
        if kind < 2
    ]
    short = np.array([special["<|image_pad|>"] if kind < 2 else kind for kind in layout], np.int32)
    long = processor.expand(short, media)
    spans = processor.spans(long, media)
    assert [span.end - span.start for span in spans] == [
        12 if kind == 0 else 8 for kind in layout if kind < 2
    ]
    assert len(long) == sum({0: 12, 1: 8}.get(kind, 1) for kind in layout)
    np.testing.assert_array_equal(processor.collapse(long, media), short)
    positions = processor.positions(long, media)
    assert positions.shape == (3, len(long))
    if len(long):
        assert positions.min() == 0
        assert (np.diff(positions.max(axis=0)) <= 8).all()


def test_spans_point_at_the_placeholders(processor, two, special):
    assert two.spans == processor.spans(two.tokens, two.media)
    covered = np.zeros(len(two.tokens), bool)
    for span in two.spans:
        covered[span.start : span.end] = True
    np.testing.assert_array_equal(covered, two.tokens == special["<|image_pad|>"])
    assert two.spans[0] == Span("image", 3, 15, 0)


def test_every_mismatch_names_the_item(processor, two, special):
    pad = special["<|image_pad|>"]
    short_run = np.delete(two.tokens, two.spans[1].start)
    long_run = np.insert(two.tokens, two.spans[1].start, pad)
    for tokens, item in ((short_run, "image 1"), (long_run, "image 2"), (two.tokens[:10], "image 0")):
        with pytest.raises(SpanMismatch) as caught:
            processor.positions(tokens, two.media)
        assert caught.value.item == item
    with pytest.raises(SpanMismatch, match="no placeholders") as caught:
        processor.spans(two.tokens[: two.spans[0].end], two.media)
    assert caught.value.item == "image 1"
    with pytest.raises(SpanMismatch, match="only 1 placeholders for 2"):
        processor.expand([pad], two.media)
    with pytest.raises(SpanMismatch, match="holds nothing"):
        processor.expand([pad, pad, pad], two.media)
    with pytest.raises(SpanMismatch, match="audio"):
        processor.expand([pad], [{"kind": "audio"}])


def test_a_placeholder_the_policy_sampled_is_an_error_and_reserved(processor, two, special):
    assert special["<|image_pad|>"] in processor.reserved_ids
    assert special["<|video_pad|>"] in processor.reserved_ids
    assert special["<|im_end|>"] not in processor.reserved_ids
    with pytest.raises(SpanMismatch, match="reserved_ids"):
        processor.positions(np.append(two.tokens, special["<|image_pad|>"]), two.media)


def test_trainer_and_engine_agreement(processor, two):
    processor.check_agreement(two.tokens, two.tokens.copy(), two.media)
    moved = np.concatenate([two.tokens[:1], two.tokens[:-1]])
    with pytest.raises(SpanMismatch, match="for the trainer and at") as caught:
        processor.check_agreement(two.tokens, moved, two.media)
    assert caught.value.item == "image 0"
    with pytest.raises(SpanMismatch, match="the engine's tokens") as caught:
        processor.check_agreement(two.tokens, np.delete(two.tokens, two.spans[1].start), two.media)
    assert caught.value.item == "image 1"
    other = two.tokens.copy()
    other[-1] += 1
    with pytest.raises(SpanMismatch, match=f"token {len(other) - 1} "):
        processor.check_agreement(two.tokens, other, two.media)
    with pytest.raises(SpanMismatch, match="the engine"):
        processor.check_agreement(two.tokens, two.tokens[:-1], two.media)


def test_text_positions_count_up(text_processor):
    positions = text_processor.positions(np.arange(5), [])
    assert positions.dtype == np.int64
    np.testing.assert_array_equal(positions, [[0, 1, 2, 3, 4]] * 3)
    assert text_processor.positions([], []).shape == (3, 0)


def test_collate_concatenates_items_and_samples_alike(two):
    batch = collate(two.media)
    assert batch["pixel_values"].shape == (48 + 32, 1536)
    np.testing.assert_array_equal(batch["image_grid_thw"], [[1, 6, 8], [1, 2, 16]])
    np.testing.assert_array_equal(batch["pixel_values"][:48], two.media[0]["pixel_values"])
    assert batch["pixel_values"].flags.writeable
    twice = collate([two, two])
    np.testing.assert_array_equal(twice["pixel_values"], np.tile(batch["pixel_values"], (2, 1)))
    assert collate([]) == {}


def test_collate_refuses_items_of_different_models(two):
    narrow = {**two.media[0], "pixel_values": two.media[0]["pixel_values"][:, :768]}
    with pytest.raises(ValueError, match="media item 1: pixel_values"):
        collate([two.media[0], narrow])
