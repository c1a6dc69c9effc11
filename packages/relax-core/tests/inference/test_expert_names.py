"""Experts under a trainer's names and under those of model files, which transformers itself relates."""

import json

import torch
from relax.backends.inference.sglang.experts import apart, together
from relax.backends.inference.sglang.model import ServedModel
from relax.backends.models import build_model, named_weights
from relax.backends.tiny import Kind, write_tiny
from safetensors.torch import load_file, save_file


def test_names_are_those_under_which_transformers_trains_and_saves(tmp_path):
    folder = write_tiny(tmp_path / "moe", "qwen3_moe")
    model = build_model(folder)
    model.save_pretrained(tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    trained = dict(named_weights(model))
    split = apart(trained)
    assert split.keys() == saved.keys()
    assert all(torch.equal(split[name], saved[name]) for name in saved)
    described = together({name: tensor.to("meta") for name, tensor in saved.items()})
    assert {name: (t.shape, t.dtype) for name, t in described.items()} == {
        name: (t.shape, t.dtype) for name, t in trained.items()
    }


def test_an_expert_is_a_view_and_a_dense_model_is_left_alone():
    layer = {"m.experts.gate_up_proj": torch.zeros(3, 8, 5), "m.experts.down_proj": torch.zeros(3, 5, 4)}
    split = apart(layer)
    layer["m.experts.gate_up_proj"][2, 5, 1] = 7
    assert split["m.experts.2.up_proj.weight"][1, 1] == 7
    dense = {"m.mlp.gate_proj.weight": torch.zeros(4, 5), "lm_head.weight": torch.zeros(9, 5)}
    assert apart(dense) == dense
    assert together(dense) == dense


def test_a_layer_that_lacks_an_expert_keeps_its_names():
    whole = apart(
        {"m.experts.gate_up_proj": torch.zeros(3, 8, 5), "m.experts.down_proj": torch.zeros(3, 5, 4)}
    )
    lacking = {name: tensor.to("meta") for name, tensor in whole.items() if ".1.up_proj" not in name}
    assert together(lacking).keys() == lacking.keys()


def test_a_tied_mixture_sends_its_output_layer_too_as_sglang_does_not_tie_it(tmp_path):
    cases: list[tuple[Kind, set[str]]] = [("qwen3_moe", {"lm_head.weight"}), ("qwen3", set())]
    for kind, extra in cases:
        folder = write_tiny(tmp_path / kind, kind)
        served = ServedModel.read(folder, "float32", tmp_path / f"{kind}-completed", 0)
        trained = dict(named_weights(build_model(served.folder)))
        assert {name: (t.shape, t.dtype) for name, t in trained.items()} == {
            name: (t.shape, t.dtype) for name, t in served.weights.items()
        }
        sent = served.for_server(trained)
        assert sent.keys() - load_file(served.folder / "model.safetensors").keys() == extra
        assert all(sent[name] is trained["model.embed_tokens.weight"] for name in extra)


def test_experts_that_a_folder_has_input_by_output_are_a_trainers_here_and_the_folders_for_a_server(tmp_path):
    folder = write_tiny(tmp_path / "seeing", "qwen3_vl")
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["Qwen3VLMoeForConditionalGeneration"]
    config["model_type"] = config["vision_config"]["model_type"] = "qwen3_vl_moe"
    mixture = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    config["text_config"] |= {"model_type": "qwen3_vl_moe_text", **mixture}
    (folder / "config.json").write_text(json.dumps(config))
    stored = {
        name: tensor.transpose(1, 2).contiguous() if ".experts." in name else tensor
        for name, tensor in named_weights(build_model(folder))
    }
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    served = ServedModel.read(folder, "float32", tmp_path / "completed", 0)
    trained = dict(named_weights(build_model(folder)))
    assert served.backwards == {name for name in trained if ".experts." in name}
    served.check_version(0, trained)
    sent = served.for_server(trained)
    assert sent.keys() - {"lm_head.weight"} == stored.keys()
    assert all(torch.equal(sent[name], stored[name]) for name in stored)
