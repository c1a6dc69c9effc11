"""The oracle: transformers' own Qwen3-VL processor and model."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omni_processor import OmniProcessor, collate, families
from PIL import Image

torch = pytest.importorskip("torch")
pytest.importorskip("torchvision", reason="transformers' image processor needs torchvision")

CLOSE = 1e-5


@pytest.fixture(scope="module")
def reference(tokenizer, preprocessor):
    """The real Qwen3VLProcessor on the same tokenizer and pixel rules."""
    from transformers import Qwen3VLProcessor
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

    torch.set_num_threads(1)
    return Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(**preprocessor),
        tokenizer=tokenizer,
        video_processor=Qwen3VLVideoProcessor(),
    )


@pytest.fixture(scope="module")
def model(special):
    """A tiny random Qwen3-VL."""
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    torch.manual_seed(0)
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": 64,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0],
    }
    text = {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 4096,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "mrope_section": [4, 2, 2],
            "mrope_interleaved": True,
        },
    }
    config = Qwen3VLConfig(
        vision_config=vision,
        text_config=text,
        image_token_id=special["<|image_pad|>"],
        video_token_id=special["<|video_pad|>"],
        vision_start_token_id=special["<|vision_start|>"],
        vision_end_token_id=special["<|vision_end|>"],
    )
    return Qwen3VLForConditionalGeneration(config).eval()


def noise(height: int, width: int, seed: int = 0) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3))
    return Image.fromarray(pixels.astype(np.uint8))


def conversation(*pictures: Image.Image) -> list[dict]:
    parts: list[dict] = []
    for number, image in enumerate(pictures):
        parts += [{"type": "text", "text": f"picture {number}: "}, {"type": "image", "image": image}]
    return [
        {"role": "system", "content": "Look closely."},
        {"role": "user", "content": [*parts, {"type": "text", "text": "what differs?"}]},
    ]


def reference_batch(reference, messages, pictures):
    text = reference.apply_chat_template(
        messages,
        tokenize=False,
        add_generation_prompt=True,
        chat_template=reference.tokenizer.chat_template,
    )
    return reference(text=[text], images=list(pictures) or None, return_tensors="pt")


@pytest.mark.parametrize(
    "sizes",
    [
        [(96, 128)],
        [(64, 64), (200, 310)],
        [(1, 40)],
        [(7, 1300)],
        [(1, 1)],
        [(999, 1001), (33, 31), (480, 640)],
    ],
)
def test_tokens_grids_and_pixels_equal_the_published_processor(processor, reference, sizes):
    pictures = [noise(height, width, seed) for seed, (height, width) in enumerate(sizes)]
    messages = conversation(*pictures)
    expected = reference_batch(reference, messages, pictures)
    sample = processor(messages)
    batch = collate(sample.media)

    assert sample.tokens.dtype == np.int32
    np.testing.assert_array_equal(sample.tokens, expected["input_ids"][0].numpy())
    np.testing.assert_array_equal(batch["image_grid_thw"], expected["image_grid_thw"].numpy())
    assert batch["image_grid_thw"].dtype == np.int64
    assert batch["pixel_values"].dtype == np.float32
    assert batch["pixel_values"].shape == tuple(expected["pixel_values"].shape)
    assert np.abs(batch["pixel_values"] - expected["pixel_values"].numpy()).max() <= CLOSE


def test_pixels_without_a_resize_are_equal(processor, reference):
    picture = noise(192, 256)
    expected = reference_batch(reference, conversation(picture), [picture])["pixel_values"].numpy()
    values = collate(processor(conversation(picture)).media)["pixel_values"]
    assert np.abs(values - expected).max() <= CLOSE


@pytest.mark.parametrize("mode", ["L", "1", "CMYK", "P"])
def test_opaque_modes_equal_the_published_processor(processor, reference, picture, mode):
    converted = picture.convert(mode)
    expected = reference_batch(reference, conversation(converted), [converted])["pixel_values"].numpy()
    values = collate(processor(conversation(converted)).media)["pixel_values"]
    assert np.abs(values - expected).max() <= CLOSE


def test_text_without_media_equals_the_published_processor(processor, reference):
    messages = [{"role": "user", "content": "only words, <image> among them"}]
    expected = reference_batch(reference, messages, [])["input_ids"][0].numpy()
    np.testing.assert_array_equal(processor(messages).tokens, expected)


def test_default_rules_equal_the_published_defaults(tokenizer, picture):
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

    published = Qwen2VLImageProcessor(
        patch_size=16,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
        size={"shortest_edge": 65536, "longest_edge": 16777216},
    )
    expected = published(images=[picture], return_tensors="pt")
    processor = OmniProcessor(tokenizer, family="qwen3_vl")
    item = processor("<image>", images=[picture]).media[0]
    np.testing.assert_array_equal(item["image_grid_thw"], expected["image_grid_thw"].numpy())
    assert np.abs(item["pixel_values"] - expected["pixel_values"].numpy()).max() <= CLOSE


def test_other_means_deviations_and_patch_sizes_are_followed(tokenizer, picture):
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

    rules = {
        "patch_size": 14,
        "merge_size": 2,
        "temporal_patch_size": 1,
        "image_mean": [0.48, 0.45, 0.40],
        "image_std": [0.26, 0.27, 0.28],
        "size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 40},
    }
    expected = Qwen2VLImageProcessor(**rules)(images=[picture], return_tensors="pt")
    family = families.create("qwen3_vl", tokenizer, preprocessor=rules)
    item = OmniProcessor(tokenizer, family=family)("<image>", images=[picture]).media[0]
    np.testing.assert_array_equal(item["image_grid_thw"], expected["image_grid_thw"].numpy())
    assert np.abs(item["pixel_values"] - expected["pixel_values"].numpy()).max() <= CLOSE


@settings(max_examples=300, deadline=None)
@given(height=st.integers(1, 3000), width=st.integers(1, 3000), longest=st.integers(4, 400))
def test_target_size_equals_the_published_rule(height, width, longest):
    from omni_processor.families.patches import target_size
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

    maximum = longest * 32 * 32
    minimum = min(65536, maximum)
    mine = target_size(height, width, 32, minimum, maximum)
    assert mine[0] % 32 == mine[1] % 32 == 0
    if max(height, width) <= 200 * min(height, width):
        assert mine == smart_resize(height, width, 32, minimum, maximum)
    else:
        assert mine[0] * mine[1] <= max(maximum, 32 * 32)


@pytest.mark.parametrize("sizes", [[], [(96, 128)], [(64, 200), (300, 64), (128, 128)]])
def test_positions_equal_the_models_get_rope_index(processor, model, special, sizes):
    pictures = [noise(height, width) for height, width in sizes]
    sample = processor(conversation(*pictures))
    tokens = np.concatenate([sample.tokens, processor.encode_text("a sampled answer")])
    image_ids = tokens == special["<|image_pad|>"]
    expected, _ = model.model.get_rope_index(
        torch.from_numpy(tokens.astype(np.int64))[None],
        torch.from_numpy(image_ids.astype(np.int64))[None],
        torch.from_numpy(collate(sample.media)["image_grid_thw"]) if pictures else None,
    )
    positions = processor.positions(tokens, sample.media)
    assert positions.dtype == np.int64
    np.testing.assert_array_equal(positions, expected[:, 0].numpy())


def test_the_model_runs_on_what_comes_out_and_logits_equal_those_of_the_published_inputs(
    processor, model, reference
):
    picture = noise(96, 128)
    sample = processor(conversation(picture))
    batch = collate([sample])
    published = reference_batch(reference, conversation(picture), [picture])
    with torch.no_grad():
        mine = model(
            input_ids=torch.from_numpy(sample.tokens.astype(np.int64))[None],
            position_ids=torch.from_numpy(processor.positions(sample.tokens, sample.media))[:, None],
            pixel_values=torch.from_numpy(batch["pixel_values"]),
            image_grid_thw=torch.from_numpy(batch["image_grid_thw"]),
        ).logits
        theirs = model(**published).logits
    torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=0)
