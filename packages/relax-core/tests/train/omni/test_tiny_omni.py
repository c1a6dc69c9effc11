"""The folder of a tiny thinker: transformers' own processor reads it, and a trainer takes what that makes."""

import numpy as np
import pytest
import torch
from PIL import Image
from relax.backends.models import build_model
from relax.backends.train.omni import hidden_states
from transformers import Qwen3OmniMoeProcessor

FRAMES = {"do_sample_frames": False, "fps": 4.0, "size": {"shortest_edge": 1024, "longest_edge": 4096}}


@pytest.fixture(scope="module")
def processor(omni_folder):
    return Qwen3OmniMoeProcessor.from_pretrained(omni_folder)


def messages(*parts):
    return [
        {"role": "user", "content": [*({"type": part} for part in parts), {"type": "text", "text": "what?"}]}
    ]


def test_the_chat_template_has_a_place_for_every_part(processor):
    made = processor.tokenizer.apply_chat_template(
        messages("image", "video", "audio"), tokenize=False, add_generation_prompt=True
    )
    assert made == (
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|><|vision_start|><|video_pad|><|vision_end|>"
        "<|audio_start|><|audio_pad|><|audio_end|>what?<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.parametrize("talking", [False, True])
def test_a_trainer_takes_what_the_processor_makes(omni_folder, studio, processor, talking):
    random = np.random.default_rng(0)
    image = Image.fromarray(random.integers(0, 255, (64, 64, 3), dtype=np.uint8))
    clip = random.integers(0, 255, (8, 64, 64, 3), dtype=np.uint8)
    time = np.arange(20800) / 16000
    wave = np.sin(2 * np.pi * 440 * time).astype(np.float32)
    parts = ("image", "video") if talking else ("image", "video", "audio")
    text = processor.tokenizer.apply_chat_template(messages(*parts), tokenize=False)
    made = processor(
        text=[text],
        images=[image],
        videos=[clip],
        audio=[wave],
        use_audio_in_video=talking,
        return_tensors="pt",
        **FRAMES,
    )
    arrays = {name: np.asarray(value) for name, value in made.items()}
    seen = {name: arrays[name] for name in ("pixel_values", "image_grid_thw")}
    moving = {
        name: arrays[name] for name in ("pixel_values_videos", "video_grid_thw", "video_second_per_grid")
    }
    heard = {name: arrays[name] for name in ("input_features", "feature_attention_mask")}
    items = [seen, moving | heard] if talking else [seen, moving, heard]
    # The rows of the other tests are expanded as the processor expands them.
    expanded = [token for item in items for token in studio.marked(item)]
    tokens = made["input_ids"][0].tolist()
    assert tokens[tokens.index(expanded[0]) :][: len(expanded)] == expanded

    model = build_model(omni_folder, torch.float64)
    with torch.no_grad():
        whole = model(**made, use_audio_in_video=talking, use_cache=False).logits
        ours = model.lm_head(hidden_states(model, made["input_ids"], [items]))
    assert float((ours - whole).abs().max()) < 1e-10
