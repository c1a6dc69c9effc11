"""What every training backend has to hold, as checks that anyone can run on theirs.

    @pytest.mark.parametrize("check", conformance.CHECKS, ids=lambda check: check.__name__)
    def test_mine(check, tmp_path):
        check(my_factory, model_folder, tmp_path)

The folder holds a small model of Hugging Face layout, in float32, that `build_model` can read: plain
transformers in the same process is what a backend is compared with. A check raises AssertionError with the
numbers that differ.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from relax.algorithms.spec import LossInputs, LossOutputs
from relax.backends.models import build_model, load_config, text_config, unsampled_tokens
from relax.backends.train.base import HoldsWeights, KeepsState, Packed, StateTree, TrainBackend, ragged
from relax.backends.train.errors import TrainError
from relax.backends.train.settings import TrainerSettings
from relax.backends.train.state_files import read_state, write_state


class Trainer(TrainBackend, HoldsWeights, KeepsState, Protocol):
    """What is checked: a trainer in one process."""


Factory = Callable[[Path, TrainerSettings], Trainer]
Check = Callable[[Factory, Path, Path], None]

TEMPERATURE = 0.8
SETTINGS = TrainerSettings(lr=3e-3, temperature=TEMPERATURE, weight_decay=0.01)


def policy_gradient(inputs: LossInputs) -> LossOutputs:
    """-sum(mask * advantage * ratio): as small a loss as uses every column that a backend hands over."""
    ratio = (inputs.logprobs - inputs.old_logprobs).exp()
    mask = inputs.mask.to(ratio.dtype)
    return LossOutputs(loss=-(mask * inputs.advantages * ratio).sum(), count=float(mask.sum()))


def make_rows(
    vocabulary: int, lengths: Sequence[tuple[int, int]], seed: int = 0, unsampled: Sequence[int] = ()
) -> list[dict[str, np.ndarray]]:
    """Random rows of (prompt, response) lengths, with columns; about one response token in four is masked.

    No token is one of `unsampled`.
    """
    random = np.random.default_rng(seed)
    choice = np.setdiff1d(np.arange(vocabulary), unsampled)
    rows = []
    for prompt, response in lengths:
        mask = (random.random(response) > 0.25).astype(np.uint8)
        mask[:1] = 1
        rows.append(
            {
                "tokens": choice[random.integers(0, len(choice), prompt + response)],
                "prompt_length": np.asarray(prompt),
                "loss_mask": mask,
                "rollout_logprobs": (-4 + 0.1 * random.standard_normal(response)).astype(np.float32),
                "advantages": (random.standard_normal(response) * mask).astype(np.float32),
            }
        )
    return rows


def pack(rows: Sequence[Mapping[str, np.ndarray]]) -> Packed:
    """Lay rows of `make_rows` out as one micro-batch."""
    tokens, offsets = ragged([row["tokens"] for row in rows], torch.int64)
    dtypes = {"loss_mask": torch.uint8, "rollout_logprobs": torch.float32, "advantages": torch.float32}
    return Packed(
        tokens=tokens,
        offsets=offsets,
        prompt_lengths=torch.tensor([int(row["prompt_length"]) for row in rows]),
        fields={name: ragged([row[name] for row in rows], dtype)[0] for name, dtype in dtypes.items()},
    )


def logprobs_equal_plain_transformers(factory: Factory, folder: Path, scratch: Path) -> None:
    """Row by row, unpadded, in float64: every response token's logprob at a temperature other than 1, with no
    probability left for tokens that only stand for media."""
    rows = _rows(folder)
    ours = factory(folder, SETTINGS).forward(pack(rows))
    assert ours.dtype == torch.float32, ours.dtype
    assert not ours.requires_grad
    _require_close("logprobs", ours, torch.cat(reference_logprobs(folder, rows)).float(), 1e-5)


def gradients_do_not_depend_on_micro_batches(factory: Factory, folder: Path, scratch: Path) -> None:
    """One micro-batch, one a row, and a reversed order give the same weights and the same norm."""
    rows = _rows(folder)
    splits = [[rows], [[row] for row in rows], [rows[3:][::-1], rows[:3]]]
    results = []
    for split in splits:
        backend = factory(folder, TrainerSettings(lr=0.0, clip_grad_norm=None))
        outputs = [backend.forward_backward(pack(part), policy_gradient) for part in split]
        count = sum(out.count for out in outputs)
        results.append(
            (sum(float(out.loss) for out in outputs), count, backend.optim_step(1 / count).grad_norm)
        )
    for result in results[1:]:
        assert np.allclose(result, results[0], rtol=1e-5, atol=1e-6), results


def a_masked_token_changes_nothing(factory: Factory, folder: Path, scratch: Path) -> None:
    """Other advantages and logprobs where the mask is 0 give the same weights, bit for bit."""
    rows = _rows(folder)
    changed = []
    for row in rows:
        unseen = row["loss_mask"] == 0
        other = {"advantages": np.where(unseen, 7, row["advantages"]).astype(np.float32)}
        other["rollout_logprobs"] = np.where(unseen, -2, row["rollout_logprobs"]).astype(np.float32)
        changed.append(row | other)
    assert any((a["advantages"] != b["advantages"]).any() for a, b in zip(rows, changed, strict=True))
    _require_same(_stepped(factory, folder, [rows]), _stepped(factory, folder, [changed]))


def a_step_is_adamw_on_the_scaled_gradient(factory: Factory, folder: Path, scratch: Path) -> None:
    """Two clipped steps equal plain transformers, autograd and torch's AdamW on the mean loss."""
    rows = _rows(folder)
    settings = TrainerSettings(lr=3e-3, temperature=TEMPERATURE, clip_grad_norm=0.05)
    backend = factory(folder, settings)
    model = build_model(folder)
    adamw = torch.optim.AdamW(
        model.parameters(), lr=3e-3, betas=settings.betas, eps=settings.eps, weight_decay=0
    )
    for _ in range(2):
        outputs = [backend.forward_backward(pack(part), policy_gradient) for part in (rows[:2], rows[2:])]
        count = sum(out.count for out in outputs)
        stats = backend.optim_step(1 / count)
        batch = pack(rows)
        inputs = LossInputs(
            logprobs=torch.cat(_plain_logprobs(model, rows)),
            old_logprobs=batch.fields["rollout_logprobs"],
            advantages=batch.fields["advantages"],
            mask=batch.fields["loss_mask"],
            offsets=batch.response_offsets,
        )
        adamw.zero_grad()
        (policy_gradient(inputs).loss / count).backward()
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05))
        adamw.step()
        assert norm > 0.05, f"the check needs a gradient that is clipped, its norm is {norm}"
        assert abs(stats.grad_norm - norm) <= 1e-4 * norm, (stats.grad_norm, norm)
        assert (stats.lr, stats.skipped) == (3e-3, False), stats
    # Adam divides by the root of the second moment: near a gradient of 0 the sign is a matter of rounding,
    # so the mean is compared.
    plain = dict(model.named_parameters())
    distances = [(ours - plain[name].detach()).abs().flatten() for name, ours in backend.tensors()]
    distance = float(torch.cat(distances).mean())
    assert distance <= 1e-5, f"weights differ by {distance} in the mean after two steps"


def what_a_step_does_not_need_has_a_gradient_of_0(factory: Factory, folder: Path, scratch: Path) -> None:
    """Weight decay reaches it, as on every backend: a tower in a step without pictures."""
    settings = TrainerSettings(lr=3e-3, weight_decay=0.5)
    rows = _rows(folder)
    backend, model = factory(folder, settings), build_model(folder)
    torch.cat(_plain_logprobs(model, rows)).sum().backward()
    unused = {name: p for name, p in model.named_parameters() if p.grad is None}
    backend.forward_backward(pack(rows), policy_gradient)
    backend.optim_step(0.1)
    for name, found in backend.tensors():
        if name in unused:
            decay = 1 - settings.lr * settings.weight_decay if found.ndim >= 2 else 1.0
            _require_close(name, found, unused[name].detach() * decay, 1e-7)


def a_gradient_that_is_not_finite_changes_nothing(factory: Factory, folder: Path, scratch: Path) -> None:
    """It is reported, skipped, does not advance the schedule, and the next step is as if it had not been."""
    settings = TrainerSettings(lr=1e-3, warmup_steps=10)
    rows = _rows(folder)
    broken = [row | {"advantages": np.full_like(row["advantages"], np.nan)} for row in rows]
    backend, undisturbed = factory(folder, settings), factory(folder, settings)
    before = _copy(backend)

    def clipping(inputs: LossInputs) -> LossOutputs:
        """Is NaN with a gradient of 0, as a clipped ratio to a logprob of NaN is."""
        return LossOutputs(inputs.logprobs.sum() * 0.0 + torch.nan, 1.0)

    for part, loss in ((broken, policy_gradient), (rows, clipping)):
        outputs = backend.forward_backward(pack(part), loss)
        assert not bool(torch.isfinite(outputs.loss)), outputs.loss
        backend.forward_backward(pack(rows), policy_gradient)
        stats = backend.optim_step(1.0)
        assert stats.skipped, stats
        assert not np.isfinite(stats.grad_norm), stats
        _require_same(before, _copy(backend))
    for one in (backend, undisturbed):
        one.forward_backward(pack(rows), policy_gradient)
    first, second = backend.optim_step(1.0), undisturbed.optim_step(1.0)
    assert first == second, (first, second)
    _require_same(_copy(backend), _copy(undisturbed))


def a_discarded_gradient_leaves_no_trace(factory: Factory, folder: Path, scratch: Path) -> None:
    """A step that was given up half way: the next one is as if it had not been, and a state may be taken."""
    backend, undisturbed = factory(folder, SETTINGS), factory(folder, SETTINGS)
    backend.discard_gradient()
    backend.forward_backward(pack(_rows(folder, 1)), policy_gradient)
    backend.discard_gradient()
    _require_same(backend.state().tensors, undisturbed.state().tensors)
    for one in (backend, undisturbed):
        one.forward_backward(pack(_rows(folder)), policy_gradient)
    assert backend.optim_step(0.1) == undisturbed.optim_step(0.1)
    _require_same(_copy(backend), _copy(undisturbed))


def a_resumed_run_equals_an_uninterrupted_one(factory: Factory, folder: Path, scratch: Path) -> None:
    """Warm-up, three steps, the state through files into a new object, three more: the same bits."""
    settings = TrainerSettings(lr=3e-3, lr_schedule="cosine", warmup_steps=2, total_steps=8)
    batches = [_rows(folder, seed) for seed in range(7)]

    def train(backend: TrainBackend, part: Sequence[list[dict[str, np.ndarray]]]) -> None:
        for rows in part:
            backend.forward_backward(pack(rows), policy_gradient)
            backend.optim_step(0.1)

    whole, first, second = (factory(folder, settings) for _ in range(3))
    for backend in (whole, first):
        backend.supervised_step(pack(batches[6]), 1e-3)
    train(whole, batches[:6])
    train(first, batches[:3])
    write_state(scratch / "state", first.state())
    second.load_state(read_state(scratch / "state"))
    train(second, batches[3:6])
    _require_same(_copy(whole), _copy(second))
    _require_same(whole.state().tensors, second.state().tensors)
    assert whole.state().data == second.state().data, (whole.state().data, second.state().data)


def a_resumed_warm_up_equals_an_uninterrupted_one(factory: Factory, folder: Path, scratch: Path) -> None:
    """A state between two supervised steps carries the warm-up's moments too."""
    whole, resumed = factory(folder, SETTINGS), factory(folder, SETTINGS)
    whole.supervised_step(pack(_rows(folder, 1)), 1e-2)
    resumed.load_state(whole.state())
    for backend in (whole, resumed):
        backend.supervised_step(pack(_rows(folder, 2)), 1e-2)
    _require_same(_copy(whole), _copy(resumed))


def a_state_is_a_copy(factory: Factory, folder: Path, scratch: Path) -> None:
    """It may be written in the background while the next step runs."""
    backend = factory(folder, SETTINGS)
    state = backend.state()
    kept = StateTree({name: tensor.clone() for name, tensor in state.tensors.items()}, dict(state.data))
    backend.forward_backward(pack(_rows(folder)), policy_gradient)
    backend.optim_step(1.0)
    _require_same(kept.tensors, state.tensors)


def a_foreign_state_is_refused_whole(factory: Factory, folder: Path, scratch: Path) -> None:
    """A missing, foreign or misshapen tensor: refused with an error of the family, nothing loaded."""
    backend = factory(folder, SETTINGS)
    before = _copy(backend)
    backend.forward_backward(pack(_rows(folder)), policy_gradient)
    backend.optim_step(1.0)
    stepped = backend.state()
    fresh = factory(folder, SETTINGS)
    name = max(stepped.tensors, key=lambda key: stepped.tensors[key].numel())
    less = {key: tensor for key, tensor in stepped.tensors.items() if key != name}
    for tensors in (
        less,
        less | {name: stepped.tensors[name][:1]},
        stepped.tensors | {"x.y": torch.zeros(2)},
    ):
        try:
            fresh.load_state(StateTree(tensors, stepped.data))
        except TrainError:
            _require_same(before, _copy(fresh))
        else:
            raise AssertionError(f"a state with tensors {sorted(tensors)[:5]}... was loaded")


def supervised_steps_lower_the_loss(factory: Factory, folder: Path, scratch: Path) -> None:
    """The first loss is the marked tokens' mean cross-entropy; twenty steps on a batch halve it."""
    rows = _rows(folder)
    backend = factory(folder, SETTINGS)
    mask = pack(rows).fields["loss_mask"].bool()
    expected = -float(torch.cat(reference_logprobs(folder, rows))[mask].mean())
    losses = [backend.supervised_step(pack(rows), 1e-2) for _ in range(20)]
    assert abs(losses[0] - expected) <= 1e-4, (losses[0], expected)
    assert losses[-1] < 0.5 * losses[0], losses


def an_export_gives_the_same_logits(factory: Factory, folder: Path, scratch: Path) -> None:
    """transformers loads the folder to the very weights that are published, under the same names."""
    backend = factory(folder, SETTINGS)
    backend.forward_backward(pack(_rows(folder)), policy_gradient)
    backend.optim_step(1.0)
    backend.export(scratch / "export")
    loaded = dict(build_model(scratch / "export").state_dict())
    published = _copy(backend)
    assert set(published) <= set(loaded), set(published) - set(loaded)
    for name, tensor in published.items():
        assert torch.equal(tensor, loaded[name]), f"{name} changed on the way through {scratch / 'export'}"
    rows = _rows(folder)
    _require_close(
        "logprobs", backend.forward(pack(rows)), torch.cat(reference_logprobs(scratch / "export", rows)), 1e-5
    )


def the_same_calls_give_the_same_bits(factory: Factory, folder: Path, scratch: Path) -> None:
    """Two objects, three steps of two micro-batches each."""
    batches = [part for seed in range(3) for part in (_rows(folder, seed)[:2], _rows(folder, seed)[2:])]
    _require_same(_stepped(factory, folder, batches), _stepped(factory, folder, batches))


CHECKS: tuple[Check, ...] = (
    logprobs_equal_plain_transformers,
    gradients_do_not_depend_on_micro_batches,
    a_masked_token_changes_nothing,
    a_step_is_adamw_on_the_scaled_gradient,
    what_a_step_does_not_need_has_a_gradient_of_0,
    a_gradient_that_is_not_finite_changes_nothing,
    a_discarded_gradient_leaves_no_trace,
    a_resumed_run_equals_an_uninterrupted_one,
    a_resumed_warm_up_equals_an_uninterrupted_one,
    a_state_is_a_copy,
    a_foreign_state_is_refused_whole,
    supervised_steps_lower_the_loss,
    an_export_gives_the_same_logits,
    the_same_calls_give_the_same_bits,
)


def reference_logprobs(folder: Path, rows: Sequence[Mapping[str, np.ndarray]]) -> list[Tensor]:
    """Float64 logprobs of each row's response by plain transformers, one row at a time."""
    model = build_model(folder).double()
    with torch.no_grad():
        return _plain_logprobs(model, rows)


def _plain_logprobs(model: PreTrainedModel, rows: Sequence[Mapping[str, np.ndarray]]) -> list[Tensor]:
    found = []
    unsampled = torch.tensor(unsampled_tokens(model.config), dtype=torch.int64)
    for row in rows:
        tokens, prompt = torch.as_tensor(row["tokens"]), int(row["prompt_length"])
        logits = model(input_ids=tokens[None], use_cache=False).logits[0] / TEMPERATURE
        logits = logits.index_fill(1, unsampled, -torch.inf)
        found.append(logits.log_softmax(-1)[prompt - 1 : -1].gather(1, tokens[prompt:, None]).flatten())
    return found


def _rows(folder: Path, seed: int = 0) -> list[dict[str, np.ndarray]]:
    config = load_config(folder)
    lengths = [(3, 7), (8, 2), (1, 12), (5, 5), (2, 1)]
    return make_rows(int(text_config(config).vocab_size), lengths, seed, unsampled_tokens(config))


def _stepped(
    factory: Factory, folder: Path, batches: Sequence[list[dict[str, np.ndarray]]]
) -> dict[str, Tensor]:
    backend = factory(folder, SETTINGS)
    for rows in batches:
        backend.forward_backward(pack(rows), policy_gradient)
        backend.optim_step(0.1)
    return _copy(backend)


def _copy(backend: HoldsWeights) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in backend.tensors()}


def _require_same(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> None:
    assert first.keys() == second.keys(), first.keys() ^ second.keys()
    differ = {
        name: float((tensor.double() - second[name].double()).abs().max())
        for name, tensor in first.items()
        if not torch.equal(tensor, second[name])
    }
    assert not differ, f"largest differences: {differ}"


def _require_close(what: str, ours: Tensor, reference: Tensor, tolerance: float) -> None:
    assert ours.shape == reference.shape, (ours.shape, reference.shape)
    difference = float((ours.double() - reference.double()).abs().max())
    assert difference <= tolerance, f"{what} differ by {difference}, allowed is {tolerance}"
