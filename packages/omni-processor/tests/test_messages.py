"""Conversations in all their shapes, and what is refused."""

import base64

import numpy as np
import pytest
from omni_processor import (
    Budget,
    BudgetExceeded,
    MessageError,
    OmniProcessor,
    SpanMismatch,
    TemplateError,
    UnsupportedModality,
)


def user(*parts):
    return [{"role": "user", "content": list(parts)}]


def test_every_shape_of_an_image_part_gives_the_same_sample(processor, picture, tmp_path):
    path = tmp_path / "a.png"
    picture.save(path)
    url = path.as_uri()
    text = {"type": "text", "text": "see"}
    expected = processor(user({"type": "image", "image": picture}, text))
    for part in (
        {"type": "image_url", "image_url": {"url": url, "detail": "high"}},
        {"type": "image_url", "image_url": url},
        {"type": "input_image", "image_url": url},
        {"type": "image", "url": url},
        {"type": "image", "path": path},
        {"type": "image", "bytes": path.read_bytes()},
        {"type": "image", "image": {"bytes": path.read_bytes(), "path": None}},
        {"type": "image", "text": None, "image": str(path), "image_url": None},
        {"image": picture},
    ):
        sample = processor(user(part, text))
        np.testing.assert_array_equal(sample.tokens, expected.tokens)
        np.testing.assert_array_equal(sample.media[0]["pixel_values"], expected.media[0]["pixel_values"])
    for sample in (
        processor(user({"type": "image"}, text), images=[picture]),
        processor([{"role": "user", "content": "<image>see"}], images=[picture]),
        processor(user({"type": "text", "text": "<image>see"}), images=[picture]),
        processor(user("<image>", "see"), images=[picture]),
    ):
        np.testing.assert_array_equal(sample.tokens, expected.tokens)


def test_base64_part_is_read(processor, picture, tmp_path):
    picture.save(tmp_path / "a.png")
    part = {"type": "image", "base64": base64.b64encode((tmp_path / "a.png").read_bytes()).decode()}
    assert processor(user(part)).token_counts["image"] == 12


def test_images_are_taken_in_the_order_of_the_text(processor, picture):
    wide, tall = picture.resize((256, 32)), picture.resize((32, 256))
    messages = [
        {"role": "user", "content": "first <image>, then"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": [{"type": "image", "image": tall}, "and <image>"]},
    ]
    sample = processor(messages, images=[wide, picture])
    grids = [item["image_grid_thw"].tolist() for item in sample.media]
    assert grids == [[[1, 2, 16]], [[1, 16, 2]], [[1, 6, 8]]]
    assert [span.item for span in sample.spans] == [0, 1, 2]
    assert [span.end - span.start for span in sample.spans] == [8, 8, 12]


def test_the_conversation_is_not_changed(processor, picture):
    part = {"type": "image", "image": picture}
    messages = [{"role": "user", "content": [part]}, {"role": "user", "content": "<image>"}]
    processor(messages, images=[picture])
    assert messages == [{"role": "user", "content": [part]}, {"role": "user", "content": "<image>"}]
    assert part == {"type": "image", "image": picture}


def test_a_plain_string_is_the_prompt_itself(processor, picture, special):
    sample = processor("a<image>b", images=[picture])
    assert sample.tokens[0] == processor.encode_text("a")[0]
    assert sample.tokens[1] == special["<|vision_start|>"]
    assert (sample.tokens[2:14] == special["<|image_pad|>"]).all()
    assert sample.tokens[14] == special["<|vision_end|>"]
    assert sample.token_counts == {"text": 4, "image": 12, "video": 0}
    assert processor.decode(processor("a<image>b").tokens) == "a<image>b"


def test_token_counts_add_up(processor, picture):
    sample = processor(user({"type": "image", "image": picture}, "and", {"type": "image", "image": picture}))
    assert sum(sample.token_counts.values()) == len(sample.tokens)
    assert sample.token_counts["image"] == 24


@pytest.mark.parametrize(
    ("prompt", "count"), [("no mark", 1), ("<image>", 2), ("<image><image>", 1), ("<image>", 0)]
)
def test_marks_and_images_must_be_as_many(processor, picture, prompt, count):
    for messages in (prompt, [{"role": "user", "content": prompt}]):
        with pytest.raises(SpanMismatch, match="must be as many"):
            processor(messages, images=[picture] * count)


def test_placeholder_tokens_written_in_text_are_an_error_and_no_shift(processor, picture):
    with pytest.raises(SpanMismatch, match="placeholder"):
        processor([{"role": "user", "content": "<|image_pad|>"}])
    with pytest.raises(SpanMismatch, match="image 1"):
        processor(user({"type": "image", "image": picture}, "<|image_pad|>"))


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "non-empty list"),
        ({"role": "user", "content": "x"}, "non-empty list"),
        (["hello"], "message 0"),
        ([{"content": "x"}], "role"),
        ([{"role": "user", "content": 3}], "int"),
        ([{"role": "user", "content": [3]}], "mappings"),
        ([{"role": "user", "content": [{"type": "text"}]}], "no text"),
        ([{"role": "user", "content": [{"type": "image"}]}], "no source"),
    ],
)
def test_malformed_conversations_are_named(processor, messages, reason):
    with pytest.raises(MessageError, match=reason):
        processor(messages)


def test_images_must_be_a_list(processor):
    with pytest.raises(MessageError, match="wrap a single one"):
        processor("<image>", images="a.png")


@pytest.mark.parametrize("kind", ["audio_url", "input_audio", "audio"])
def test_other_modalities_are_named(processor, kind):
    with pytest.raises(UnsupportedModality, match="takes text, image"):
        processor(user({"type": kind, kind: "x"}))


def test_text_models_refuse_images_and_join_text_parts(text_processor, picture):
    for messages, images in (
        (user({"type": "image", "image": picture}), None),
        ("<image>", [picture]),
        ("no mark", [picture]),
    ):
        with pytest.raises(UnsupportedModality, match="text only"):
            text_processor(messages, images=images)
    with pytest.raises(UnsupportedModality, match="text only"):
        text_processor.plan(picture)
    parts = text_processor(user({"type": "text", "text": "a "}, {"type": "text", "text": "b"}))
    np.testing.assert_array_equal(parts.tokens, text_processor([{"role": "user", "content": "a b"}]).tokens)


def test_a_sample_over_its_budget_is_refused_before_decoding(make_processor, picture):
    processor = make_processor(budget=Budget(max_sample_tokens=20))
    with pytest.raises(BudgetExceeded, match=r"24 tokens \(12, 12\)"):
        processor("<image><image>", images=[picture, picture])
    assert processor("<image>", images=[picture]).token_counts["image"] == 12


def test_item_budgets_bound_the_plan_and_the_result(make_processor, picture):
    shrunk = make_processor(budget=Budget(max_item_tokens=6))
    grown = make_processor(budget=Budget(min_item_tokens=48))
    assert shrunk.plan(picture).tokens == shrunk("<image>", images=[picture]).token_counts["image"] <= 6
    assert grown.plan(picture).tokens == grown("<image>", images=[picture]).token_counts["image"] >= 48


def test_a_template_that_fails_says_so(make_tokenizer):
    picky = OmniProcessor(make_tokenizer("{{ raise_exception('roles must alternate') }}"))
    with pytest.raises(TemplateError, match="roles must alternate"):
        picky([{"role": "user", "content": "x"}])
    with pytest.raises(TemplateError, match="no chat template"):
        OmniProcessor(make_tokenizer(None))([{"role": "user", "content": "x"}])
