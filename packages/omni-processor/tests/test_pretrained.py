"""Model folders: what is read from them, what is wrong with them, and what importing costs."""

import json
import subprocess
import sys

import numpy as np
import pytest
from omni_processor import Budget, ConfigError, Limits, OmniProcessor, families
from omni_processor.families.patches import PixelRules
from omni_processor.families.qwen3_vl import Qwen3VL


def rewrite(path, **changes):
    value = json.loads(path.read_text())
    value.update(changes)
    path.write_text(json.dumps({key: item for key, item in value.items() if item is not None}))


def rules_of(folder) -> PixelRules:
    family = OmniProcessor.from_pretrained(folder).family
    assert isinstance(family, Qwen3VL)
    return family.rules


def test_a_vision_folder_gives_the_same_results_as_its_parts(vl_folder, processor, picture):
    loaded = OmniProcessor.from_pretrained(vl_folder)
    assert loaded.family == processor.family
    messages = [{"role": "user", "content": [{"type": "image", "image": picture}, "what?"]}]
    mine, expected = loaded(messages), processor(messages)
    np.testing.assert_array_equal(mine.tokens, expected.tokens)
    np.testing.assert_array_equal(mine.media[0]["pixel_values"], expected.media[0]["pixel_values"])


def test_a_folder_as_transformers_saves_its_processor_is_read(tmp_path, tokenizer, processor, preprocessor):
    pytest.importorskip("torchvision")
    from transformers import Qwen3VLProcessor
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

    Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(**preprocessor),
        tokenizer=tokenizer,
        video_processor=Qwen3VLVideoProcessor(),
        chat_template=tokenizer.chat_template,
    ).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_vl"}))
    loaded = OmniProcessor.from_pretrained(str(tmp_path))
    assert isinstance(loaded.family, Qwen3VL)
    assert loaded.family.rules == processor.family.rules
    assert loaded.family.clips.pixels.min_pixels == 128 * 32 * 32  # as that video processor was made
    assert loaded([{"role": "user", "content": "x"}]).tokens.size


def test_a_text_folder_is_family_text(text_folder, text_processor):
    loaded = OmniProcessor.from_pretrained(text_folder)
    assert loaded.family.name == "text"
    assert loaded.reserved_ids == ()
    messages = [{"role": "user", "content": "hello"}]
    np.testing.assert_array_equal(loaded(messages).tokens, text_processor(messages).tokens)


def test_end_and_padding_tokens(vl_folder, text_folder, special):
    loaded = OmniProcessor.from_pretrained(vl_folder)
    assert loaded.eos_token_ids == (special["<|im_end|>"], special["<|endoftext|>"])
    assert loaded.pad_token_id == special["<|endoftext|>"]
    assert OmniProcessor.from_pretrained(text_folder).eos_token_ids == (special["<|im_end|>"],)


def test_end_and_padding_tokens_without_a_tokenizers_help(make_tokenizer, special):
    tokenizer = make_tokenizer()
    tokenizer.pad_token = None
    ids = {"eos_token_id": 7, "pad_token_id": 9}
    assert OmniProcessor(tokenizer, generation_config=ids).eos_token_ids == (7, special["<|im_end|>"])
    assert OmniProcessor(tokenizer, generation_config=ids).pad_token_id == 9
    assert OmniProcessor(tokenizer).pad_token_id == special["<|im_end|>"]
    tokenizer.eos_token = None
    with pytest.raises(ConfigError, match="end token"):
        OmniProcessor(tokenizer)


def test_an_old_chat_template_file_is_read(text_folder):
    template = (text_folder / "chat_template.jinja").read_text()
    (text_folder / "chat_template.jinja").unlink()
    (text_folder / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    loaded = OmniProcessor.from_pretrained(text_folder)
    assert loaded.tokenizer.chat_template == template


def test_pixel_rules_come_from_the_preprocessor_config(vl_folder):
    rewrite(
        vl_folder / "preprocessor_config.json",
        size=None,
        min_pixels=5000,
        max_pixels=90_000,
        image_std=[0.25] * 3,
    )
    rules = rules_of(vl_folder)
    assert (rules.min_pixels, rules.max_pixels, rules.std) == (5000, 90_000, (0.25, 0.25, 0.25))
    (vl_folder / "preprocessor_config.json").unlink()
    assert rules_of(vl_folder).max_pixels == 16_777_216


@pytest.mark.parametrize(
    ("file", "changes", "reason"),
    [
        ("config.json", {"image_token_id": 3}, "do not belong together"),
        ("config.json", {"vision_config": {"patch_size": 14}}, "patch_size is 16 .* but 14"),
        ("config.json", {"model_type": "qwen9_vl", "vision_config": {}}, "qwen9_vl.*no family"),
        ("preprocessor_config.json", {"do_normalize": False}, "do_normalize"),
        ("preprocessor_config.json", {"size": {"shortest_edge": 9000, "longest_edge": 80}}, "9000..80"),
        ("preprocessor_config.json", {"image_mean": [0.5]}, "image_mean"),
        ("preprocessor_config.json", {"resample": 1}, "resample is 1"),
    ],
)
def test_contradictions_in_a_folder_are_named(vl_folder, file, changes, reason):
    rewrite(vl_folder / file, **changes)
    with pytest.raises(ConfigError, match=reason):
        OmniProcessor.from_pretrained(vl_folder)


def test_missing_and_broken_files_are_named(text_folder):
    (text_folder / "generation_config.json").write_text("{no json")
    with pytest.raises(ConfigError, match=r"generation_config\.json is not valid JSON"):
        OmniProcessor.from_pretrained(text_folder)
    (text_folder / "generation_config.json").write_text("[]")
    with pytest.raises(ConfigError, match="an object was expected"):
        OmniProcessor.from_pretrained(text_folder)
    (text_folder / "generation_config.json").unlink()
    (text_folder / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"no config\.json"):
        OmniProcessor.from_pretrained(text_folder)
    assert OmniProcessor.from_pretrained(text_folder, family="text").eos_token_ids
    (text_folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        OmniProcessor.from_pretrained(text_folder, family="text")
    (text_folder / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match="no tokenizer"):
        OmniProcessor.from_pretrained(text_folder, family="text")


def test_paths_that_are_no_folder_are_named(text_folder):
    with pytest.raises(ConfigError, match="check the path"):
        OmniProcessor.from_pretrained("/no/such/folder")
    with pytest.raises(ConfigError, match="is a file"):
        OmniProcessor.from_pretrained(text_folder / "config.json")
    with pytest.raises(ConfigError, match="cannot be fetched"):
        OmniProcessor.from_pretrained("nobody/such-a-model-is-not-cached")


def test_a_tokenizer_without_vision_tokens_is_refused(make_tokenizer):
    tokenizer = make_tokenizer()
    with pytest.raises(ConfigError, match="no model family 'qwen3_v'"):
        OmniProcessor(tokenizer, family="qwen3_v")
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    plain = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE(vocab={"a": 0}, merges=[])), eos_token="a"
    )
    with pytest.raises(ConfigError, match=r"lacks .*<\|image_pad\|>"):
        families.create("qwen3_vl", plain)


def test_limits_below_one_are_refused():
    with pytest.raises(ConfigError, match="max_item_tokens is 0"):
        Budget(max_item_tokens=0)
    with pytest.raises(ConfigError, match="max_bytes is -1"):
        Limits(max_bytes=-1)


COST = """
import json, sys
import omni_processor
heavy = [name for name in ("torch", "transformers") if name in sys.modules]
processor = omni_processor.OmniProcessor.from_pretrained(sys.argv[1])
tokens = processor([{"role": "user", "content": "hello"}]).tokens.tolist()
suffix = processor.template_suffix(None, [{"role": "tool", "content": "4"}]).tokens.tolist()
classes = [name for name in sys.modules if name.startswith("transformers.models.") and ".modeling_" in name]
print(json.dumps({"import": heavy, "torch": "torch" in sys.modules, "classes": classes}))
"""


def test_text_loads_neither_torch_nor_model_classes(text_folder):
    out = subprocess.run(
        [sys.executable, "-c", COST, str(text_folder)],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    ).stdout
    cost = json.loads(out.splitlines()[-1])
    assert cost["import"] == []
    assert cost["torch"] is False
    assert cost["classes"] == []  # one alone would take 12 s
