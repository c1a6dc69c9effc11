"""What is particular to torch_native: exact gradients, its errors, its warm-up, export of companions."""

import gc
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from relax.algorithms.spec import LossOutputs
from relax.backends.models import build_model
from relax.backends.train.conformance import make_rows, pack, policy_gradient
from relax.backends.train.errors import (
    BatchError,
    ExportError,
    NonFiniteError,
    SettingsError,
    StateMismatchError,
    StepOrderError,
    TrainError,
    UntrainableModelError,
)
from relax.backends.train.settings import TrainerSettings
from relax.backends.train.torch_native import TorchNative

VOCABULARY = 102
LENGTHS = [(3, 7), (8, 2), (1, 12), (5, 5), (2, 1)]


@pytest.fixture
def rows():
    return make_rows(VOCABULARY, LENGTHS)


@pytest.fixture
def trainer(text_folder):
    return TorchNative(text_folder, settings=TrainerSettings(lr=1e-3, temperature=0.8))


def gradients(trainer, split):
    trainer.model.zero_grad()
    for part in split:
        trainer.forward_backward(pack(part), policy_gradient)
    return torch.cat([p.grad.flatten() for p in trainer.model.parameters()])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-10)])
def test_gradients_do_not_depend_on_the_micro_batch_split(text_folder, rows, dtype, tolerance):
    trainer = TorchNative(text_folder, settings=TrainerSettings(lr=1e-3, temperature=0.8), dtype=dtype)
    whole = gradients(trainer, [rows])
    for split in ([[row] for row in rows], [rows[4:], rows[1:4], rows[:1]]):
        assert float((gradients(trainer, split) - whole).abs().max() / whole.abs().max()) < tolerance


def test_gradients_are_those_of_plain_transformers_in_float64(text_folder, rows):
    trainer = TorchNative(
        text_folder, settings=TrainerSettings(lr=1e-3, temperature=0.8), dtype=torch.float64
    )
    ours = gradients(trainer, [rows])
    model = build_model(text_folder, torch.float64)
    for row in rows:
        tokens, prompt = torch.as_tensor(row["tokens"]), int(row["prompt_length"])
        logits = model(input_ids=tokens[None]).logits[0, prompt - 1 : -1] / 0.8
        logprobs = logits.log_softmax(-1).gather(1, tokens[prompt:, None]).flatten()
        weights = torch.as_tensor(row["loss_mask"] * row["advantages"])
        (-(weights * (logprobs - torch.as_tensor(row["rollout_logprobs"])).exp()).sum()).backward()
    plain = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    assert float((ours - plain).abs().max() / plain.abs().max()) < 1e-10


def test_the_loss_sees_the_columns_of_the_batch_in_row_order(trainer, rows):
    batch = pack(rows)
    reference = torch.arange(len(batch.fields["loss_mask"]), dtype=torch.float32)
    batch.fields["reference_logprobs"] = reference  # type: ignore[index]
    seen = []

    def loss(inputs):
        seen.append(inputs)
        return LossOutputs(loss=inputs.logprobs.sum(), count=1.0, metrics={"kl": (1.0, 2.0)})

    outputs = trainer.forward_backward(batch, loss)
    (inputs,) = seen
    assert torch.equal(inputs.logprobs.detach(), trainer.forward(batch))
    assert torch.equal(inputs.old_logprobs, batch.fields["rollout_logprobs"])
    assert torch.equal(inputs.advantages, batch.fields["advantages"])
    assert torch.equal(inputs.mask, batch.fields["loss_mask"])
    assert torch.equal(inputs.reference_logprobs, reference)
    assert inputs.offsets.tolist() == [0, 7, 9, 21, 26, 27]
    assert not outputs.loss.requires_grad
    assert outputs.metrics == {"kl": (1.0, 2.0)}


def test_the_learning_rate_follows_the_schedule_and_clipping_bounds_the_gradient(text_folder, rows):
    settings = TrainerSettings(
        lr=1.0, lr_schedule="linear", warmup_steps=2, total_steps=4, clip_grad_norm=1e-12
    )
    trainer = TorchNative(text_folder, settings=settings)
    before = {name: tensor.clone() for name, tensor in trainer.tensors()}
    rates = []
    for _ in range(5):
        trainer.forward_backward(pack(rows), policy_gradient)
        stats = trainer.optim_step(0.1)
        rates.append(stats.lr)
        assert stats.grad_norm > 1e-3, "the norm is that before clipping"
    assert rates == [0.5, 1.0, 1.0, 0.5, 0.0]
    # With a gradient of norm 1e-12 and eps 1e-8, Adam moves by 1e-4 * lr at most; unclipped by lr.
    moved = max(float((tensor - before[name]).abs().max()) for name, tensor in trainer.tensors())
    assert 0 < moved < 3.0 * 1e-4


def test_the_gradient_is_scaled_once_and_steps_at_the_rate_that_is_reported(text_folder, rows):
    settings = TrainerSettings(lr=1e-2, warmup_steps=4, clip_grad_norm=None, eps=1e-20)
    trainer = TorchNative(text_folder, settings=settings)
    before = {name: tensor.clone() for name, tensor in trainer.tensors()}
    trainer.forward_backward(pack(rows), policy_gradient)
    sums = {name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.grad is not None}
    stats = trainer.optim_step(1 / 32)
    state = trainer.state().tensors
    for name, gradient in sums.items():
        torch.testing.assert_close(
            state[f"optimizer.exp_avg.{name}"], (1 - settings.betas[0]) * gradient / 32
        )
    norm = torch.stack([gradient.square().sum() for gradient in sums.values()]).sum().sqrt() / 32
    assert stats.grad_norm == pytest.approx(float(norm), rel=1e-5)
    # Adam's first step is the rate itself wherever there is a gradient.
    moved = torch.cat([(tensor - before[name])[sums[name] != 0].abs() for name, tensor in trainer.tensors()])
    assert stats.lr == 0.25e-2
    torch.testing.assert_close(moved, torch.full_like(moved, stats.lr), rtol=1e-3, atol=1e-6)


def test_weight_decay_spares_norms(text_folder, rows):
    trainer = TorchNative(text_folder, settings=TrainerSettings(lr=0.1, weight_decay=0.5))
    before = {name: tensor.clone() for name, tensor in trainer.tensors()}
    zero = [row | {"advantages": np.zeros_like(row["advantages"])} for row in rows]
    trainer.forward_backward(pack(zero), policy_gradient)
    assert trainer.optim_step(1.0).grad_norm == 0
    for name, tensor in trainer.tensors():
        expected = before[name] if tensor.ndim < 2 else before[name] * (1 - 0.1 * 0.5)
        torch.testing.assert_close(tensor, expected)


def test_rl_starts_with_clean_moments_after_a_warm_up(text_folder, rows):
    settings = TrainerSettings(lr=1e-2, weight_decay=0.0)
    warm, fresh = (TorchNative(text_folder, settings=settings) for _ in range(2))
    for _ in range(3):
        warm.supervised_step(pack(rows), 1e-2)
    assert any(name.startswith("warmup_optimizer.") for name in warm.state().tensors)
    state = warm.state()
    fresh.load_state(
        type(state)({k: v for k, v in state.tensors.items() if not k.startswith("warmup_")}, state.data)
    )
    for trainer in (warm, fresh):
        trainer.forward_backward(pack(rows), policy_gradient)
        trainer.optim_step(0.1)
    first, second = warm.state(), fresh.state()
    assert not any(name.startswith("warmup_optimizer.") for name in first.tensors)
    assert first.tensors.keys() == second.tensors.keys()
    assert all(torch.equal(tensor, second.tensors[name]) for name, tensor in first.tensors.items())


def test_a_warm_up_gradient_that_is_not_finite_ends_the_warm_up_untouched(trainer, rows):
    before = {name: tensor.clone() for name, tensor in trainer.tensors()}
    head = trainer.model.get_output_embeddings()
    hook = head.register_forward_hook(lambda *_: _[2] * float("inf"))
    with pytest.raises(NonFiniteError, match="warm-up gradient norm is nan"):
        trainer.supervised_step(pack(rows), 1e-3)
    hook.remove()
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.tensors())


def test_verbs_out_of_order_are_refused(trainer, rows):
    with pytest.raises(StepOrderError, match="without a gradient"):
        trainer.optim_step(1.0)
    trainer.forward_backward(pack(rows), policy_gradient)
    for scale in (math.inf, math.nan, 0.0, -1.0):
        with pytest.raises(BatchError, match="scale is"):
            trainer.optim_step(scale)
    with pytest.raises(StepOrderError, match="supervised_step between 1"):
        trainer.supervised_step(pack(rows), 1e-3)
    with pytest.raises(StepOrderError, match="state between 1"):
        trainer.state()
    assert not trainer.optim_step(1.0).skipped
    assert trainer.steps == 1


def test_a_loss_that_ignores_the_policy_is_refused(trainer, rows):
    with pytest.raises(BatchError, match="depends on logprobs"):
        trainer.forward_backward(pack(rows), lambda inputs: LossOutputs(inputs.advantages.sum(), 1.0))
    with pytest.raises(BatchError, match="one number"):
        trainer.forward_backward(pack(rows), lambda inputs: LossOutputs(inputs.logprobs, 1.0))


def test_a_missing_column_is_named(trainer, rows):
    batch = pack(rows)
    del batch.fields["advantages"]  # type: ignore[attr-defined]
    with pytest.raises(
        BatchError, match=r"'advantages' is missing; the batch has \['loss_mask', 'rollout_logprobs'\]"
    ):
        trainer.forward_backward(batch, policy_gradient)
    with pytest.raises(BatchError, match="loss_mask marks none of 27"):
        trainer.supervised_step(pack([row | {"loss_mask": row["loss_mask"] * 0} for row in rows]), 1e-3)


def test_a_text_model_refuses_media(trainer, rows):
    batch = pack(rows)
    object.__setattr__(batch, "media", [[{"pixel_values": 0}], [], [], [], []])
    with pytest.raises(BatchError, match=r"media, which .*qwen3\) cannot see"):
        trainer.forward(batch)


def test_a_folder_without_tokenizer_trains_and_one_without_config_does_not(text_folder, tmp_path, rows):
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(text_folder / name, bare / name)
    settings = TrainerSettings(lr=1e-3)
    trainer = TorchNative(bare, settings=settings)
    trainer.export(tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").is_file()
    (bare / "config.json").unlink()
    with pytest.raises(UntrainableModelError, match=r"bare.*config\.json"):
        TorchNative(bare, settings=settings)
    assert issubclass(UntrainableModelError, TrainError)


def test_a_model_whose_logits_are_capped_is_refused(text_folder, monkeypatch):
    from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM

    plain = Qwen3ForCausalLM.forward

    def capped(self, *args, **kwargs):
        outputs = plain(self, *args, **kwargs)
        outputs["logits"] = 0.01 * torch.tanh(outputs["logits"] / 0.01)
        return outputs

    monkeypatch.setattr(Qwen3ForCausalLM, "forward", capped)
    with pytest.raises(UntrainableModelError, match="not just its output layer"):
        TorchNative(text_folder, settings=TrainerSettings(lr=1e-3))


def test_dtypes_that_cannot_be_trained_are_refused(text_folder):
    with pytest.raises(SettingsError, match="int64 cannot be trained"):
        TorchNative(text_folder, settings=TrainerSettings(lr=1e-3), dtype=torch.int64)


def test_a_trainer_does_not_live_in_the_files_of_its_folder(text_folder, tmp_path):
    own = tmp_path / "own"
    shutil.copytree(text_folder, own)
    trainer = TorchNative(own, settings=TrainerSettings(lr=1e-3))
    gc.collect()
    assert str(own) not in Path("/proc/self/maps").read_text()
    assert all(tensor.data_ptr() % 64 == 0 for _, tensor in trainer.tensors()), (
        "as torch aligns what it allocates"
    )


def test_equal_trainers_have_equal_states(text_folder):
    torch.manual_seed(1)
    first = TorchNative(text_folder, settings=TrainerSettings(lr=1e-3), seed=4).state()
    torch.manual_seed(2)
    second = TorchNative(text_folder, settings=TrainerSettings(lr=1e-3), seed=4).state()
    assert first.tensors.keys() == second.tensors.keys()
    assert all(torch.equal(tensor, second.tensors[name]) for name, tensor in first.tensors.items())
    assert first.data == second.data


def test_a_folder_without_weights_draws_them_from_the_seed(text_folder, tmp_path):
    bare = tmp_path / "bare"
    shutil.copytree(text_folder, bare, ignore=shutil.ignore_patterns("*.safetensors"))
    settings = TrainerSettings(lr=1e-3)
    one, same, other = (dict(TorchNative(bare, settings=settings, seed=seed).tensors()) for seed in (1, 1, 2))
    assert all(torch.equal(tensor, same[name]) for name, tensor in one.items())
    assert not all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_an_export_carries_the_companions_and_the_tied_weight_once(trainer, text_folder, tmp_path):
    from safetensors import safe_open

    target = tmp_path / "deep" / "export"
    trainer.export(target)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        assert (target / name).read_bytes() == (text_folder / name).read_bytes()
    assert json.loads((target / "config.json").read_text())["dtype"] == "float32"
    with safe_open(target / "model.safetensors", "pt") as weights:
        assert set(weights.keys()) == {name for name, _ in trainer.tensors()}
        assert "lm_head.weight" not in weights.keys()  # noqa: SIM118
    assert [path.name for path in target.parent.iterdir()] == ["export"], "no scratch folder is left"


def test_transformers_loads_an_export_with_the_same_logits_bit_for_bit(trainer, tmp_path, rows):
    from transformers import AutoModelForCausalLM

    trainer.forward_backward(pack(rows), policy_gradient)
    trainer.optim_step(0.1)
    trainer.export(tmp_path / "export")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float32).eval()
    tokens = torch.arange(24).reshape(2, 12)
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=tokens).logits, trainer.model(input_ids=tokens).logits)


def test_an_export_overwrites_nothing(trainer, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious").write_text("x")
    (tmp_path / "file").write_text("x")
    for name in ("full", "file"):
        with pytest.raises(ExportError, match=f"{name} is already there"):
            trainer.export(tmp_path / name)
    assert (tmp_path / "full" / "precious").read_text() == "x"


def test_a_state_of_another_backend_is_refused(trainer):
    state = trainer.state()
    data = dict(state.data)
    for changed, message in (
        ({"backend": "other"}, r"\('other', 1\)"),
        ({"steps": None}, "has done None steps"),
    ):
        state.data = data | changed
        with pytest.raises(StateMismatchError, match=message):
            trainer.load_state(state)


def test_published_weights_keep_their_memory_over_steps_and_loads(trainer, rows):
    before = {name: tensor.data_ptr() for name, tensor in trainer.tensors()}
    state = trainer.state()
    trainer.forward_backward(pack(rows), policy_gradient)
    trainer.optim_step(0.1)
    trainer.load_state(state)
    assert {name: tensor.data_ptr() for name, tensor in trainer.tensors()} == before
    assert len({tensor.data_ptr() for _, tensor in trainer.tensors()}) == len(before), (
        "tied weights come once"
    )


def test_a_state_that_does_not_fit_is_named_with_its_folder(trainer, vision_folder, tmp_path):
    TorchNative(vision_folder, settings=trainer.settings).save(tmp_path / "other")
    with pytest.raises(StateMismatchError, match=r"state folder .*other does not fit: state has weights"):
        trainer.load(tmp_path / "other")
    (tmp_path / "ranks").mkdir()
    (tmp_path / "ranks" / "relax.json").write_text("{}")
    with pytest.raises(StateMismatchError, match=r"ranks holds a checkpoint of actor\.backend=megatron"):
        trainer.load(tmp_path / "ranks")
