"""Parts of a model that are left as they are, with torch_native in one process."""

import pytest
import torch
from pydantic import ValidationError
from relax.backends.train.conformance import make_rows, pack, policy_gradient
from relax.backends.train.errors import SettingsError
from relax.backends.train.freeze import part_of
from relax.backends.train.settings import TrainerSettings
from relax.backends.train.torch_native import TorchNative
from relax.backends.train.torch_native.trainer import NativeOptions, options_of
from relax.config.roles import ActorSettings

SETTINGS = TrainerSettings(lr=1e-3, weight_decay=0.1)


def make(folder, *parts, dtype=torch.float32):
    return TorchNative(folder, settings=SETTINGS, dtype=dtype, options=NativeOptions(freeze=parts))


def step(trainer):
    trainer.forward_backward(pack(make_rows(90, [(3, 4), (2, 6)])), policy_gradient)
    return trainer.optim_step(0.1)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("model.language_model.layers.0.self_attn.q_proj.weight", "language"),
        ("lm_head.weight", "language"),
        ("model.embed_tokens.weight", "language"),
        ("model.visual.blocks.0.attn.qkv.weight", "vision"),
        ("model.visual.pos_embed.weight", "vision"),
        ("model.visual.merger.norm.weight", "projector"),
        ("model.visual.deepstack_merger_list.1.linear_fc2.bias", "projector"),
        ("thinker.visual.merger_list.0.ln_q.weight", "projector"),
        ("thinker.visual.blocks.0.norm1.weight", "vision"),
        ("thinker.audio_tower.layers.0.fc1.weight", "audio"),
        ("thinker.audio_tower.proj2.weight", "projector"),
        ("thinker.model.layers.0.mlp.gate.weight", "language"),
    ],
)
def test_a_tensor_belongs_to_a_part(name, part):
    assert part_of(name) == part


@pytest.mark.parametrize("parts", [("vision",), ("vision", "projector"), ("projector",)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_frozen_parts_have_no_gradient_no_moments_and_no_masters(vision_folder, parts, dtype):
    trainer = make(vision_folder, *parts, dtype=dtype)
    before = {name: tensor.clone() for name, tensor in trainer.tensors()}
    assert not step(trainer).skipped
    after = dict(trainer.tensors())
    assert before.keys() == after.keys()
    frozen = {name for name in before if part_of(name) in parts}
    assert frozen
    state = trainer.state().tensors
    for name, tensor in before.items():
        if name in frozen:
            assert torch.equal(after[name], tensor)
            assert f"optimizer.exp_avg.{name}" not in state
        elif part_of(name) == "language":
            assert f"optimizer.exp_avg.{name}" in state
            assert dtype == torch.bfloat16 or not torch.equal(after[name], tensor)
    assert all(p.grad is None for name, p in trainer.model.named_parameters() if name in frozen)


def test_a_batch_of_text_only_decays_the_towers_where_the_language_model_is_frozen(vision_folder):
    trainer = make(vision_folder, "language")
    before = {name: tensor.clone() for name, tensor in trainer.tensors()}
    stats = step(trainer)
    assert not stats.skipped
    assert stats.grad_norm == 0
    for name, tensor in trainer.tensors():
        decays = part_of(name) != "language" and tensor.ndim >= 2
        kept = 1 - SETTINGS.lr * SETTINGS.weight_decay if decays else 1.0
        torch.testing.assert_close(tensor, before[name] * kept, rtol=1e-6, atol=0, msg=name)
    assert trainer.supervised_step(pack(make_rows(90, [(3, 4)])), 1e-3) > 0


def test_frozen_parts_are_published_exported_and_saved(vision_folder, tmp_path):
    trainer, whole = make(vision_folder, "vision"), make(vision_folder)
    assert [name for name, _ in trainer.tensors()] == [name for name, _ in whole.tensors()]
    step(trainer)
    trainer.export(tmp_path / "out")
    again = make(tmp_path / "out", "vision")
    found = dict(again.tensors())
    assert all(torch.equal(tensor, found[name]) for name, tensor in trainer.tensors())
    state = trainer.state()
    other = make(vision_folder, "vision")
    other.load_state(state)
    step(trainer)
    step(other)
    theirs = dict(other.tensors())
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in trainer.tensors())


def test_what_a_model_has_not_cannot_be_frozen_and_something_has_to_train(vision_folder):
    with pytest.raises(SettingsError, match=r"names 'audio', but the model has language, vision, projector"):
        make(vision_folder, "audio")
    with pytest.raises(SettingsError, match="leaves nothing of the model to train"):
        make(vision_folder, "language", "vision", "projector")


def test_a_config_names_each_part_once_and_no_adapters_beside():
    actor = ActorSettings(freeze=("vision", "projector"))
    assert options_of(actor).freeze == ("vision", "projector")
    with pytest.raises(ValidationError, match="freeze names vision twice"):
        ActorSettings(freeze=("vision", "vision"))
    with pytest.raises(ValidationError, match="Input should be 'language', 'vision', 'audio' or 'projector'"):
        ActorSettings.model_validate({"freeze": ["tower"]})
    with pytest.raises(ValidationError, match="adapters leave all of the model's own weights as they are"):
        ActorSettings.model_validate({"freeze": ["vision"], "lora": {"rank": 4}})
