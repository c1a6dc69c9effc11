"""Which trainers and engines a model that hears is for, told from its config.json."""

import json

import pytest
from relax.backends.tiny import write_tiny
from relax.config.load import resolve
from relax.orchestration.model_shape import shape_of
from relax.orchestration.suitability import unsuitable


@pytest.fixture
def content(tmp_path):
    return json.loads((write_tiny(tmp_path, "qwen3_omni") / "config.json").read_text())


def faults(content, **settings):
    config = resolve({"data": {"path": "d"}, **settings}, {}, "a test")
    return list(unsuitable(config, shape_of(content)))


@pytest.mark.parametrize("backend", ["torch_native", "megatron"])
def test_trainers_take_a_thinker_and_a_whole_omni(content, backend):
    whole = {"model_type": "qwen3_omni_moe", "thinker_config": content}
    for model in (content, whole):
        assert faults(model, actor={"backend": backend}, model={"text_only": True}) == []
        assert faults(model, actor={"backend": backend}) == []


def test_what_else_hears_is_trained_on_text_alone(content):
    other = content | {"model_type": "qwen2_5_omni_thinker"}
    found = faults(other)
    assert any(
        "it trains qwen3_vl, qwen3_omni_moe_thinker, qwen3_omni_moe on that" in fault for fault in found
    )
    assert faults(other, model={"text_only": True}) == []
    whole = {"model_type": "qwen2_5_omni", "thinker_config": content}
    assert any(
        "it reads qwen3_omni_moe, as its thinker" in fault
        for fault in faults(whole, model={"text_only": True})
    )
