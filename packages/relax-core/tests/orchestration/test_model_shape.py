"""Sizes that a config.json tells, against published counts and the models that transformers builds."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from relax.config import ConfigError, resolve
from relax.orchestration import memory
from relax.orchestration.model_shape import read_shape, shape_of

MODELS = Path(__file__).parents[4] / "configs/models"

PUBLISHED = {
    "Qwen3-4B": 4.02e9,
    "Qwen3-30B-A3B": 30.53e9,
    "Qwen3-VL-4B-Instruct": 4.44e9,
    "Qwen3-Omni-30B-A3B-Instruct": 31.72e9,
    "Qwen3-Omni-30B-A3B-Instruct-thinker": 31.72e9,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_weights_of_a_public_model_are_counted(name):
    assert read_shape(MODELS / name).weights == pytest.approx(PUBLISHED[name], rel=1e-3)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_counts_are_those_of_the_models_that_transformers_builds():
    """Built without memory (torch's meta device), in a process of its own, as it imports four families."""
    code = """
import json, sys, torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
for name in sys.argv[1:]:
    config = AutoConfig.from_pretrained(name)
    kind = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    with torch.device("meta"):
        model = kind.from_config(config)
    print(json.dumps([name, sum(p.numel() for p in model.parameters())]))
"""
    names = [str(MODELS / name) for name in PUBLISHED if name != "Qwen3-Omni-30B-A3B-Instruct"]
    done = subprocess.run(
        [sys.executable, "-c", code, *names],
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    counted = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert len(counted) == len(names)
    for name, count in counted:
        assert read_shape(Path(name)).weights == count, name


def test_a_cache_holds_keys_and_values_of_the_heads_of_a_rank():
    shape = read_shape(MODELS / "Qwen3-30B-A3B")
    assert shape.cache_bytes(2) == 2 * 48 * 4 * 128 * 2
    assert shape.cache_bytes(2, tensor_parallel=2) == shape.cache_bytes(2) // 2
    assert shape.cache_bytes(2, tensor_parallel=8) == shape.cache_bytes(2) // 4  # a head is not split
    assert shape.cache_bytes(2, pipeline_parallel=2) == shape.cache_bytes(2) // 2


def test_only_the_layers_that_route_have_experts():
    content = json.loads((MODELS / "Qwen3-30B-A3B/config.json").read_text())
    whole = shape_of(content)
    some = shape_of(content | {"mlp_only_layers": [0, 1], "decoder_sparse_step": 2})
    assert whole.moe_layers == 48
    assert some.moe_layers == 23  # every second one, less layer 1
    assert some.in_experts == 23 * 128 * 3 * 2048 * 768


def test_a_size_that_is_not_named_is_told(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "rwkv", "hidden_size": 8}')
    with pytest.raises(ConfigError, match="names no num_attention_heads"):
        read_shape(tmp_path)


def run(**settings):
    return resolve({"data": {"path": "d"}, **settings}, {}, "a test")


def sizes(estimate):
    return {term.what: term.nbytes for term in estimate.terms}


def test_megatron_holds_sixteen_bytes_and_two_of_a_weight_and_splits_them():
    shape = read_shape(MODELS / "Qwen3-4B")
    plain = {"backend": "megatron", "device": "cuda", "dtype": "bfloat16"}
    alone = sizes(memory.actor(run(actor=plain), shape))
    assert alone["weights"] == 2 * shape.weights
    assert alone["gradients"] == 4 * shape.weights
    assert alone["masters and moments"] == 12 * shape.weights
    split = plain | {
        "tensor_parallel": 2,
        "data_parallel": 4,
        "megatron": {"distributed_optimizer": True},
    }
    many = sizes(memory.actor(run(actor=split), shape))
    assert many["weights"] == 2 * (shape.weights // 2)
    assert many["masters and moments"] == 12 * (shape.weights // 2 // 4)


def test_experts_are_split_over_expert_parallel_ranks():
    shape = read_shape(MODELS / "Qwen3-30B-A3B")
    actor = {
        "backend": "megatron",
        "device": "cuda",
        "dtype": "bfloat16",
        "tensor_parallel": 2,
        "data_parallel": 4,
        "expert_parallel": 8,
        "megatron": {"distributed_optimizer": True, "sequence_parallel": True},
    }
    held = sizes(memory.actor(run(actor=actor), shape))
    dense = (shape.weights - shape.in_experts) // 2
    assert held["weights"] == pytest.approx(2 * (dense + shape.in_experts / 8), rel=1e-9)
    # Of experts there is one replica: its state is not split further.
    assert held["masters and moments"] == pytest.approx(12 * (dense / 4 + shape.in_experts / 8), rel=1e-9)


def test_fsdp_shards_everything_and_gathers_two_layers():
    shape = read_shape(MODELS / "Qwen3-4B")
    actor = {"device": "cuda", "dtype": "bfloat16", "data_parallel": 4}
    held = sizes(memory.actor(run(actor=actor), shape))
    assert held["shards of weights"] + held["shards of gradients and moments"] == 16 * shape.weights // 4
    assert held["gathered"] == 2 * (2 * shape.largest_layer + shape.outside)
    whole = sizes(memory.actor(run(actor=actor | {"fsdp": False}), shape))
    assert whole["weights"] == 2 * shape.weights
    assert whole["masters, gradients and moments"] == 16 * shape.weights


def test_recomputation_and_fewer_tokens_make_activations_smaller():
    shape = read_shape(MODELS / "Qwen3-4B")
    actor = {"device": "cuda", "dtype": "bfloat16", "rank_tokens": 8192}
    model = {"path": "m", "context_length": 4096}
    kept = sizes(memory.actor(run(actor=actor, model=model), shape))
    again = sizes(memory.actor(run(actor=actor | {"gradient_checkpointing": True}, model=model), shape))
    assert again["inputs of layers"] + again["one layer computed again"] < kept["activations"] / 10
    fewer = sizes(memory.actor(run(actor=actor | {"rank_tokens": 4096}, model=model), shape))
    assert fewer["activations"] == kept["activations"] // 2
    # A row is never cut: the longest there may be is what is reckoned with.
    least = sizes(memory.actor(run(actor=actor | {"rank_tokens": 16}, model=model), shape))
    assert least == fewer


def test_a_server_fills_what_its_weights_leave_with_its_cache():
    shape = read_shape(MODELS / "Qwen3-4B")
    rollout = {"engine": "sglang", "sglang": {"memory_fraction": 0.5}}
    config = run(rollout=rollout, model={"path": "m", "dtype": "bfloat16"})
    estimate, tokens = memory.engine(config, shape, 40 << 30)
    assert estimate.nbytes == pytest.approx(20 << 30, rel=1e-4)
    assert tokens == ((20 << 30) - 2 * shape.weights) // shape.cache_bytes(2)
    assert memory.engine(config, shape, 10 << 30)[1] == 0


def test_a_mixture_has_its_experts_however_their_number_is_called():
    """transformers 5 saves `num_local_experts` where published files say `num_experts`."""
    content = json.loads((MODELS / "Qwen3-30B-A3B/config.json").read_text())
    saved = dict(content)
    saved["num_local_experts"] = saved.pop("num_experts")
    assert shape_of(saved) == shape_of(content)
    assert shape_of(saved).experts == 128
