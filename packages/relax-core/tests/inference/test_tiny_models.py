import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from relax.backends.model_files import ModelFolderError
from relax.backends.models import build_model, load_config, named_weights
from relax.backends.tiny import ALPHABET, SPECIALS, write_tiny
from safetensors.torch import save_file
from transformers import AutoImageProcessor, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer


def test_writing_a_tiny_folder_imports_neither_torch_nor_transformers(tmp_path):
    program = (
        "import sys; from relax.backends.tiny import write_tiny; write_tiny(sys.argv[1], 'qwen3_vl');"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, timeout=60)
    assert (tmp_path / "preprocessor_config.json").is_file()


def test_transformers_auto_classes_load_the_text_folder(tmp_path):
    folder = write_tiny(tmp_path, max_position_embeddings=300)
    config = load_config(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert (config.model_type, config.max_position_embeddings) == ("qwen3", 300)
    assert type(AutoModelForCausalLM.from_config(config)) is type(build_model(folder))
    assert len(tokenizer) == config.vocab_size == len(SPECIALS) + len(ALPHABET)
    assert (tokenizer.pad_token_id, tokenizer.eos_token) == (0, "<|im_end|>")
    parameters = sum(tensor.numel() for _, tensor in named_weights(build_model(folder)))
    assert 90_000 < parameters < 110_000


def test_every_printable_character_and_special_is_one_token_and_round_trips(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(write_tiny(tmp_path))
    text = ALPHABET + "  a\n\nb" + "".join(SPECIALS)
    ids = tokenizer.encode(text)
    assert len(ids) == len(ALPHABET) + 6 + len(SPECIALS)
    assert tokenizer.decode(ids) == text


def test_the_chat_template_renders_every_role_and_content_parts(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(write_tiny(tmp_path))
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what?"}]},
        {"role": "assistant", "content": "7"},
        {"role": "tool", "content": "ok"},
    ]
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nbe brief<|im_end|>\n"
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>what?<|im_end|>\n"
        "<|im_start|>assistant\n7<|im_end|>\n"
        "<|im_start|>tool\nok<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    with pytest.raises(Exception, match="neither text nor image"):
        tokenizer.apply_chat_template([{"role": "user", "content": [{"type": "smell"}]}], tokenize=False)


@pytest.mark.parametrize(("pixels", "tokens"), [(8, 1), (32, 1), (64, 4), (256, 4)])
def test_a_digit_costs_one_to_four_tokens_in_the_vision_folder(tmp_path, pixels, tokens):
    folder = write_tiny(tmp_path, "qwen3_vl")
    processor = AutoImageProcessor.from_pretrained(folder)
    image = Image.fromarray(np.full((pixels, pixels, 3), 200, np.uint8))
    grid = processor(images=[image], return_tensors="pt")["image_grid_thw"]
    assert int(grid.prod()) // 4 == tokens
    config = load_config(folder)
    assert type(AutoModelForImageTextToText.from_config(config)) is type(build_model(folder))


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_vl"])
def test_seeded_weights_repeat_bit_for_bit_and_leave_the_global_generator_alone(tmp_path, kind):
    folder = write_tiny(tmp_path, kind)
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    first, again, other = (dict(named_weights(build_model(folder, seed=seed))) for seed in (1, 1, 2))
    assert torch.equal(before, torch.random.get_rng_state())
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


def test_named_weights_gives_tied_weights_once_and_shares_memory(tmp_path):
    model = build_model(write_tiny(tmp_path))
    weights = dict(named_weights(model))
    assert "lm_head.weight" not in weights
    weights["model.embed_tokens.weight"].zero_()
    assert not model.lm_head.weight.any()


def test_saved_weights_come_back_and_foreign_or_missing_ones_are_named(tmp_path):
    folder = write_tiny(tmp_path)
    model = build_model(folder, seed=3)
    model.save_pretrained(folder)
    loaded = build_model(folder, seed=4)
    assert all(
        torch.equal(a, b) for (_, a), (_, b) in zip(named_weights(model), named_weights(loaded), strict=True)
    )
    drawn = build_model(folder, weights=False, seed=3)
    assert torch.equal(drawn.lm_head.weight, model.lm_head.weight)
    kept = {name: tensor.clone() for name, tensor in named_weights(model) if name != "model.norm.weight"}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelFolderError, match=r"missing_keys.*model\.norm\.weight"):
        build_model(folder)


def test_a_folder_without_config_is_refused_by_name(tmp_path):
    with pytest.raises(ModelFolderError, match=r"no config\.json"):
        load_config(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text('{"model_type": "no_such_model"}')
    with pytest.raises(ModelFolderError, match="no_such_model"):
        load_config(tmp_path)


@pytest.mark.parametrize("wrong", [{"kind": "gpt"}, {"num_key_value_heads": 3}, {"head_dim": 15}])
def test_dimensions_that_do_not_fit_are_refused(tmp_path, wrong):
    with pytest.raises(ValueError, match="|".join(str(value) for value in wrong.values())):
        write_tiny(tmp_path, **wrong)


def test_the_tiny_mixture_of_experts_is_what_transformers_calls_qwen3_moe(tmp_path):
    folder = write_tiny(tmp_path, "qwen3_moe", num_experts=4, num_experts_per_tok=3, num_hidden_layers=1)
    model = build_model(folder)
    config = load_config(folder)

    assert type(AutoModelForCausalLM.from_config(config)) is type(model)
    assert (config.num_experts, config.num_experts_per_tok, config.norm_topk_prob) == (4, 3, True)
    assert dict(named_weights(model))["model.layers.0.mlp.experts.gate_up_proj"].shape == (4, 96, 64)
    with pytest.raises(ValueError, match="num_experts_per_tok is 9; 8 experts take 1 to 8"):
        write_tiny(tmp_path, "qwen3_moe", num_experts_per_tok=9)
    with pytest.raises(ValueError, match="for qwen3_moe and qwen3_omni; qwen3 has no experts"):
        write_tiny(tmp_path, num_experts=4)
