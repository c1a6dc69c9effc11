"""An Omni thinker under torch_native: logprobs and gradients of rows with images, video and sound are those
of the model's own forward.
"""

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
import torch
from relax.backends.models import build_model, load_config, unsampled_tokens
from relax.backends.train.conformance import policy_gradient
from relax.backends.train.errors import BatchError
from relax.backends.train.omni import towers
from relax.backends.train.omni.placing import sound_tokens
from relax.backends.train.settings import TrainerSettings
from relax.backends.train.torch_native import TorchNative
from relax.backends.train.torch_native.trainer import NativeOptions
from safetensors.torch import load_file

# Norms, routers and rotary embeddings compute in float32 whatever the dtype.
FLOAT64 = 1e-6


def make(folder, studio, dtype=torch.float32, options=None) -> TorchNative:
    settings = TrainerSettings(lr=1e-3, temperature=studio.temperature)
    return TorchNative(folder, settings=settings, dtype=dtype, options=options)


def gradients(model) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def require_close(ours, plain) -> None:
    assert ours.keys() == plain.keys()
    for name, gradient in plain.items():
        scale = max(1e-3, float(gradient.abs().max()))
        assert float((ours[name] - gradient).abs().max()) / scale < FLOAT64, name


def test_logprobs_equal_the_models_own_forward(omni_folder, studio):
    rows = studio.rows()
    ours = make(omni_folder, studio).forward(studio.batch(rows))
    model = build_model(omni_folder, torch.float64)
    with torch.no_grad():
        plain = torch.cat([studio.plain_logprobs(model, row) for row in rows])
    assert float((ours - plain).abs().max()) < 1e-5


def test_gradients_equal_plain_transformers_also_in_the_towers(omni_folder, studio):
    rows = studio.rows()
    trainer = make(omni_folder, studio, torch.float64)
    trainer.forward_backward(studio.batch(rows), policy_gradient)
    model = build_model(omni_folder, torch.float64)
    for row in rows:
        ratio = (studio.plain_logprobs(model, row) - torch.as_tensor(row["rollout_logprobs"])).exp()
        (-(torch.as_tensor(row["loss_mask"] * row["advantages"]) * ratio).sum()).backward()
    plain = gradients(model)
    require_close(gradients(trainer.model), plain)
    for tower, least in (("visual.", 35), ("audio_tower.", 40)):
        moved = [name for name, g in plain.items() if name.startswith(tower) and float(g.abs().max()) > 1e-6]
        assert len(moved) > least, tower


def test_recomputing_changes_no_gradient(omni_folder, studio):
    rows = studio.rows()
    plain = make(omni_folder, studio, torch.float64)
    again = make(omni_folder, studio, torch.float64, options=NativeOptions(gradient_checkpointing=True))
    for trainer in (plain, again):
        trainer.forward_backward(studio.batch(rows), policy_gradient)
    require_close(gradients(again.model), gradients(plain.model))


def test_half_precision_is_near_and_its_masters_move(omni_folder, studio):
    batch = studio.batch(studio.rows())
    half = make(omni_folder, studio, torch.bfloat16)
    distance = (half.forward(batch) - make(omni_folder, studio).forward(batch)).abs()
    assert 0 < float(distance.mean()) < 0.1
    before = half.forward(batch)
    for _ in range(3):
        half.forward_backward(batch, policy_gradient)
        assert not half.optim_step(0.05).skipped
    assert not torch.equal(half.forward(batch), before)


def test_gradients_do_not_depend_on_which_rows_share_a_micro_batch(omni_folder, studio):
    rows = studio.rows()
    trainer = make(omni_folder, studio, torch.float64)
    found = []
    for split in ([rows], [rows[4:], rows[:4][::-1]]):
        trainer.model.zero_grad()
        for part in split:
            trainer.forward_backward(studio.batch(part), policy_gradient)
        found.append(gradients(trainer.model))
    require_close(found[1], found[0])


def test_what_a_group_is_shown_goes_through_the_towers_once(omni_folder, studio):
    trainer = make(omni_folder, studio)
    seen, heard = [], []
    trainer.model.visual.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    trainer.model.audio_tower.register_forward_pre_hook(
        lambda _, args, named: heard.append(int(named["chunk_lengths"].sum())), with_kwargs=True
    )
    rows = studio.rows()
    again = {
        **rows[5],
        "media": [{n: v.copy() if n != "kind" else v for n, v in rows[5]["media"][0].items()}],
    }
    trainer.forward(studio.batch([rows[5]] * 4 + [again, rows[1], rows[2]]))
    assert seen == [3 * 8 + 16]
    assert heard == [130]


def test_a_sound_is_heard_as_the_tower_itself_hears_it(omni_folder, studio):
    """Also one longer than attention sees at once, and a short one beside it."""
    tower: Any = build_model(omni_folder, torch.float64).audio_tower
    mels = [
        torch.as_tensor(studio.sound(seconds, seed)["input_features"][0])
        for seed, seconds in enumerate((17.3, 0.3, 8.0))
    ]
    with torch.no_grad():
        theirs = tower(torch.cat(mels, dim=1), feature_lens=torch.tensor([mel.shape[1] for mel in mels]))
        assert torch.equal(towers.heard(tower, mels, 100), theirs.last_hidden_state)
        alone = tower(mels[1], feature_lens=torch.tensor([30])).last_hidden_state
        assert torch.equal(towers.heard(tower, mels[1:2], 30), alone)
        first = sound_tokens(mels[0].shape[1], tower.n_window)
        beside = theirs.last_hidden_state[first : first + len(alone)]
        assert float((towers.heard(tower, mels[1:2], 100) - beside).abs().max()) < 1e-12
        assert float((alone - beside).abs().max()) > 1e-5


def test_every_modality_matters(omni_folder, studio):
    trainer = make(omni_folder, studio)
    rows = studio.rows()
    batch = studio.batch(rows)
    before = trainer.forward(batch)
    offsets = batch.response_offsets
    for name in ("pixel_values", "pixel_values_videos", "input_features"):
        changed = [
            row
            | {"media": [item | ({name: item[name] + 1} if name in item else {}) for item in row["media"]]}
            for row in rows
        ]
        after = trainer.forward(studio.batch(changed))
        for index, row in enumerate(rows):
            moved = float((after - before)[offsets[index] : offsets[index + 1]].abs().max())
            assert (moved > 1e-4) == any(name in item for item in row["media"]), (name, index, moved)


def test_a_tower_that_is_shown_nothing_moves_by_its_moments_alone(omni_folder, studio):
    trainer = make(omni_folder, studio)
    rows = studio.rows()
    both = ("audio_tower.", "visual.")
    for part, moving in ((rows[:1], ()), (rows[2:3], ("audio_tower.",)), (rows[1:2], both), (rows[:1], both)):
        before = {name: tensor.clone() for name, tensor in trainer.tensors()}
        trainer.forward_backward(studio.batch(part), policy_gradient)
        trainer.optim_step(0.1)
        moved = {n.partition(".")[0] + "." for n, t in trainer.tensors() if not torch.equal(t, before[n])}
        assert moved - {"model.", "lm_head."} == set(moving)


def test_routes_are_followed_while_something_is_shown(omni_folder, studio):
    rows = studio.rows()
    batch = studio.batch(rows)
    trainer = make(omni_folder, studio, torch.float64)
    config = load_config(omni_folder).text_config
    shape = (len(batch.tokens), config.num_hidden_layers, config.num_experts)
    order = torch.rand(shape, generator=torch.Generator().manual_seed(2)).argsort(-1)
    routes = order[..., : config.num_experts_per_tok].to(torch.int16)
    routes[batch.offsets[1:] - 1] = -1
    given = dataclasses.replace(batch, routes=routes)
    used = []
    gate = trainer.model.model.layers[1].mlp.gate
    inner = gate.forward
    gate.forward = lambda *args: used.append(inner(*args)[2]) or inner(*args)
    led = trainer.forward(given)
    lengths = batch.offsets.diff()
    width = int(lengths.max())
    for row, (first, length) in enumerate(zip(batch.offsets[:-1].tolist(), lengths.tolist(), strict=True)):
        followed = used[0][row * width : row * width + length - 1]
        assert torch.equal(followed, routes[first : first + length - 1, 1].long())
    assert float((led - trainer.forward(batch)).abs().max()) > 1e-3
    trainer.forward_backward(given, policy_gradient)
    assert float(gate.weight.grad.abs().max()) > 0


def test_an_export_is_a_thinker_that_transformers_loads(omni_folder, studio, tmp_path):
    trainer = make(omni_folder, studio)
    batch = studio.batch(studio.rows())
    trainer.forward_backward(batch, policy_gradient)
    trainer.optim_step(0.1)
    trainer.export(tmp_path / "out")
    for name in ("preprocessor_config.json", "video_preprocessor_config.json", "tokenizer.json"):
        assert (tmp_path / "out" / name).read_bytes() == (omni_folder / name).read_bytes()
    assert torch.equal(make(tmp_path / "out", studio).forward(batch), trainer.forward(batch))


def test_a_placeholder_is_never_said(omni_folder, studio):
    assert unsampled_tokens(load_config(omni_folder)) == studio.unsampled
    row = studio.rows()[7]
    mask = np.ones_like(row["loss_mask"])
    with pytest.raises(BatchError, match=r"is 105, which only stands for media"):
        make(omni_folder, studio).forward(studio.batch([row | {"loss_mask": mask}]))


def test_a_whole_omni_is_trained_as_its_thinker_and_goes_on_to_speak(
    omni_folder, whole_folder, studio, tmp_path
):
    batch = studio.batch(studio.rows()[:3])
    ours, theirs = make(whole_folder, studio), make(omni_folder, studio)
    assert [name for name, _ in ours.tensors()] == [name for name, _ in theirs.tensors()]
    assert torch.equal(ours.forward(batch), theirs.forward(batch))
    for trainer in (ours, theirs):
        trainer.forward_backward(batch, policy_gradient)
        trainer.optim_step(0.1)
    ours.export(tmp_path / "whole")
    theirs.export(tmp_path / "thinker")
    config = json.loads((tmp_path / "whole" / "config.json").read_text())
    assert config["model_type"] == "qwen3_omni_moe"
    index = json.loads((tmp_path / "whole" / "model.safetensors.index.json").read_text())["weight_map"]
    made = {name: load_file(tmp_path / "whole" / file)[name] for name, file in index.items()}
    trained = load_file(tmp_path / "thinker" / "model.safetensors")
    before = load_file(whole_folder / "model.safetensors")
    assert made.keys() == before.keys()
    for name, tensor in made.items():
        thinkers = name.removeprefix("thinker.")
        assert torch.equal(tensor, before[name] if thinkers == name else trained[thinkers]), name
    assert torch.equal(make(tmp_path / "whole", studio).forward(batch), ours.forward(batch))
