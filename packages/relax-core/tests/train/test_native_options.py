"""torch_native beside the plain thing: half precision with masters, recomputing, packing, adapters."""

from pathlib import Path

import pytest
import torch
from relax import algorithms
from relax.backends.train.conformance import make_rows, pack
from relax.backends.train.errors import SettingsError, StateMismatchError
from relax.backends.train.settings import TrainerSettings
from relax.backends.train.torch_native import TorchNative
from relax.backends.train.torch_native.trainer import NativeOptions
from relax.config.lora import LoraSettings

SETTINGS = TrainerSettings(lr=1e-4, temperature=0.8)
LOSS = algorithms.build("grpo", {}).loss
LENGTHS = [(3, 7), (8, 2), (1, 12), (5, 5), (2, 1)]
LORA = LoraSettings(rank=4, alpha=8.0)


def batch(seed: int = 0):
    return pack(make_rows(60, LENGTHS, seed))


def train(trainer: TorchNative, steps: int) -> TorchNative:
    for seed in range(steps):
        outputs = [trainer.forward_backward(batch(seed + part), LOSS) for part in range(2)]
        trainer.optim_step(1 / sum(out.count for out in outputs))
    return trainer


def apart(first: TorchNative, second: TorchNative) -> float:
    """Mean distance of the weights that are stepped."""
    theirs = second.state().tensors
    distances = [
        (tensor.float() - theirs[name].float()).abs().flatten()
        for name, tensor in first.state().tensors.items()
        if name.startswith("weight.")
    ]
    return float(torch.cat(distances).mean())


def gradients(trainer: TorchNative) -> dict[str, torch.Tensor]:
    trainer.forward_backward(batch(), LOSS)
    return {name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.grad is not None}


def test_half_precision_with_masters_follows_float32_where_without_it_does_not(text_folder):
    exact = train(TorchNative(text_folder, settings=SETTINGS), 6)
    half = {
        masters: train(
            TorchNative(
                text_folder,
                settings=SETTINGS,
                dtype=torch.bfloat16,
                options=NativeOptions(master_weights=masters),
            ),
            6,
        )
        for masters in (True, False)
    }
    assert apart(half[True], exact) < 0.5 * apart(half[False], exact)
    assert all(tensor.dtype == torch.bfloat16 for _, tensor in half[True].tensors()), "as it computes"
    state = half[True].state().tensors
    assert {state[name].dtype for name in state if name.startswith("weight.")} == {torch.float32}


def test_masters_resume_bit_for_bit(text_folder, tmp_path):
    whole, first, second = (
        TorchNative(text_folder, settings=SETTINGS, dtype=torch.bfloat16) for _ in range(3)
    )
    train(whole, 2)
    train(first, 2).save(tmp_path / "state")
    second.load(tmp_path / "state")
    for one in (whole, second):
        train(one, 2)
    assert apart(whole, second) == 0.0
    for (name, ours), (_, theirs) in zip(whole.tensors(), second.tensors(), strict=True):
        assert torch.equal(ours, theirs), name


@pytest.mark.parametrize(
    "options",
    [NativeOptions(gradient_checkpointing=True), NativeOptions(packing=True)],
    ids=["again", "packed"],
)
def test_recomputing_and_packing_change_no_logprob_and_no_gradient(text_folder, options):
    plain, other = (
        TorchNative(text_folder, settings=SETTINGS, options=o) for o in (NativeOptions(), options)
    )
    torch.testing.assert_close(other.forward(batch()), plain.forward(batch()), rtol=0, atol=1e-5)
    expected = gradients(plain)
    found = gradients(other)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5, msg=name)


def test_recomputing_keeps_less_for_the_backward_pass(text_folder):
    kept = []
    for options in (NativeOptions(), NativeOptions(gradient_checkpointing=True)):
        trainer = TorchNative(text_folder, settings=SETTINGS, options=options)
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor, sizes=sizes: (sizes.append(tensor.nbytes), tensor)[1], lambda tensor: tensor
        ):
            trainer._policy(batch())
        kept.append(sum(sizes))
    assert kept[1] < 0.5 * kept[0], kept


def test_an_adapter_is_all_that_is_trained_and_all_that_is_saved(text_folder):
    trainer = TorchNative(text_folder, settings=TrainerSettings(lr=1e-2), options=NativeOptions(lora=LORA))
    plain = TorchNative(text_folder, settings=TrainerSettings(lr=1e-2))
    assert torch.equal(trainer.forward(batch()), plain.forward(batch())), "it begins as no change at all"
    before = {name: tensor.clone() for name, tensor in trainer.tensors()}
    assert before.keys() == dict(plain.tensors()).keys()
    losses = [trainer.supervised_step(batch(), 1e-2) for _ in range(20)]
    assert losses[-1] < 0.8 * losses[0], losses
    changed = {name for name, tensor in trainer.tensors() if not torch.equal(tensor, before[name])}
    assert changed
    assert {name.split(".")[-2] for name in changed} <= set(LORA.targets)
    for name, tensor in trainer.base_tensors():
        assert torch.equal(tensor, before[name]), name
    state = trainer.state().tensors
    assert all(".lora_" in name for name in state if not name.startswith("rng."))
    assert sum(t.nbytes for t in state.values()) < sum(t.nbytes for t in plain.state().tensors.values())


def test_a_merged_export_equals_the_adapted_model_and_a_resume_goes_on_with_it(text_folder, tmp_path):
    options = NativeOptions(lora=LORA)
    trainer = TorchNative(text_folder, settings=TrainerSettings(lr=1e-2), options=options)
    train(trainer, 3)
    trainer.export(tmp_path / "merged")
    merged = TorchNative(tmp_path / "merged", settings=SETTINGS.__class__(lr=1e-2))
    torch.testing.assert_close(merged.forward(batch()), trainer.forward(batch()), rtol=0, atol=1e-5)
    for name, tensor in merged.tensors():
        assert torch.equal(tensor, dict(trainer.tensors())[name]), name
    trainer.save(tmp_path / "state")
    resumed = TorchNative(text_folder, settings=TrainerSettings(lr=1e-2), options=options)
    resumed.load(tmp_path / "state")
    for one in (trainer, resumed):
        train(one, 2)
    assert torch.equal(trainer.forward(batch()), resumed.forward(batch()))
    with pytest.raises(StateMismatchError, match="lora"):
        TorchNative(text_folder, settings=SETTINGS).load(tmp_path / "state")


def test_layers_that_are_not_there_get_no_adapter(text_folder: Path):
    for wrong, message in (("qq_proj", r"names \['qq_proj'\]"), ("lm_head", "the embedding's, too")):
        lora = LoraSettings(rank=2, targets=["q_proj", wrong])
        with pytest.raises(SettingsError, match=message):
            TorchNative(text_folder, settings=SETTINGS, options=NativeOptions(lora=lora))
