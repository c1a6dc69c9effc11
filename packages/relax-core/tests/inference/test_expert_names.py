"""Experts under a trainer's names and under those of model files, which transformers itself relates."""

import torch
from relax.backends.inference.sglang.experts import apart, together
from relax.backends.inference.sglang.model import ServedModel
from relax.backends.models import build_model, named_weights
from relax.backends.tiny import Kind, write_tiny
from safetensors.torch import load_file


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
