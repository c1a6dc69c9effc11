"""Two ranks train as one does, whether they share the weights (FSDP2) or not; what breaks is named."""

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import dcs
import pytest
import torch
from relax.backends.train.conformance import make_rows, pack
from relax.backends.train.errors import BatchError, RankFailed, StateMissingError, StepOrderError
from relax.backends.train.gang.gang import Gang
from relax.backends.train.torch_native import TorchNative
from relax.backends.train.torch_native.shard_files import read_whole
from relax.config.system import WeightSettings
from relax.distributed.bus import Endpoint

LENGTHS = [(3, 7), (8, 2), (1, 12), (5, 5), (2, 1)]


def batch(seed: int = 0, lengths=LENGTHS):
    return pack(make_rows(60, lengths, seed))


@pytest.fixture(scope="module", params=["sharded", "replicas"])
def kind(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def running(start, kind, tmp_path_factory):
    """The gang of a kind, and the folder of its state at the beginning."""
    with start(data_parallel=2, fsdp=kind == "sharded") as gang:
        began = tmp_path_factory.mktemp("began") / "state"
        gang.save(began)
        yield gang, began


@pytest.fixture
def gang(running) -> Gang:
    gang, began = running
    gang.load(began)
    return gang


@pytest.fixture
def alone(text_folder, gang) -> TorchNative:
    return TorchNative(text_folder, settings=gang.settings)


def step(trainer, loss, seed: int = 0, lengths=LENGTHS):
    outputs = [trainer.forward_backward(batch(seed + part, lengths), loss) for part in range(2)]
    return outputs, trainer.optim_step(1 / sum(out.count for out in outputs))


def saved(trainer, folder: Path) -> dict[str, torch.Tensor]:
    trainer.save(folder)
    return {
        name: tensor for name, tensor in read_whole(folder).tensors.items() if not name.startswith("rng.")
    }


def require_close(found, expected, tolerance: float) -> None:
    names = {name for name in expected if not name.startswith("rng.")}
    assert found.keys() == names
    far = {name: float((found[name] - expected[name]).abs().max()) for name in names}
    assert max(far.values()) <= tolerance, far


def test_logprobs_and_gradients_are_those_of_one_rank(gang, alone, loss, tmp_path):
    torch.testing.assert_close(gang.forward(batch()), alone.forward(batch()), rtol=0, atol=1e-5)
    (first, second), stats = step(gang, loss)
    (own_first, own_second), own_stats = step(alone, loss)
    for ours, theirs in ((first, own_first), (second, own_second)):
        assert float(ours.loss) == pytest.approx(float(theirs.loss), abs=1e-5)
        assert ours.count == theirs.count
        assert ours.metrics.keys() == theirs.metrics.keys()
        for name, pair in ours.metrics.items():
            assert pair == pytest.approx(theirs.metrics[name], rel=1e-5), name
    assert stats.grad_norm == pytest.approx(own_stats.grad_norm, rel=1e-5)
    assert (stats.lr, stats.skipped) == (own_stats.lr, False)
    # The first moment after one step is a tenth of the gradient.
    state, expected = saved(gang, tmp_path / "state"), alone.state().tensors
    moments = {name: tensor for name, tensor in expected.items() if ".exp_avg." in name}
    assert len(moments) == 24
    require_close({name: state[name] for name in moments}, moments, 1e-6)


def test_a_replica_without_a_row_runs_a_dummy_that_counts_nowhere(gang, alone, loss, tmp_path):
    one = [(3, 9)]
    (ours, _), stats = step(gang, loss, lengths=one)
    (theirs, _), own_stats = step(alone, loss, lengths=one)
    assert (ours.count, ours.metrics["ratio"][1]) == (theirs.count, theirs.metrics["ratio"][1])
    assert stats.grad_norm == pytest.approx(own_stats.grad_norm, rel=1e-5)
    torch.testing.assert_close(gang.forward(batch()), alone.forward(batch()), rtol=0, atol=1e-4)


def test_supervised_steps_are_those_of_one_rank(gang, alone):
    for seed in range(3):
        ours, theirs = (trainer.supervised_step(batch(seed), 1e-3) for trainer in (gang, alone))
        assert ours == pytest.approx(theirs, rel=1e-5)


def test_a_resumed_gang_goes_on_bit_for_bit(gang, loss, tmp_path):
    step(gang, loss)
    gang.save(tmp_path / "half")
    step(gang, loss, seed=5)
    straight = saved(gang, tmp_path / "straight")
    gang.load(tmp_path / "half")
    step(gang, loss, seed=5)
    require_close(saved(gang, tmp_path / "resumed"), straight, 0.0)


def test_a_run_goes_on_with_another_number_of_ranks(gang, alone, loss, tmp_path):
    step(gang, loss)
    gang.save(tmp_path / "two")
    alone.load(tmp_path / "two")
    assert alone.steps == 1
    require_close(saved(gang, tmp_path / "again"), alone.state().tensors, 0.0)
    step(alone, loss, seed=5)
    alone.save(tmp_path / "one")
    gang.load(tmp_path / "one")
    require_close(saved(gang, tmp_path / "back"), alone.state().tensors, 0.0)


def test_an_export_has_the_weights_of_all_ranks(gang, loss, tmp_path):
    step(gang, loss)
    gang.export(tmp_path / "export")
    exported = TorchNative(tmp_path / "export", settings=gang.settings)
    torch.testing.assert_close(exported.forward(batch()), gang.forward(batch()), rtol=0, atol=1e-5)
    assert (tmp_path / "export" / "tokenizer.json").is_file()


def test_engines_are_given_hugging_face_tensors_by_the_ranks_that_own_them(gang, alone, tmp_path):
    wanted = dict(alone.tensors())
    with dcs.serve(token="t") as coordinator:
        publisher = gang.publish_to(Endpoint(coordinator.address, "t"), "run", WeightSettings())
        with dcs.Subscriber(
            coordinator.address, run="run", name="engine", layout=dcs.layout.of(wanted), token="t"
        ) as engine:
            publisher.publish(0)
            staged = engine.next(after=-1, timeout=30)
            assert staged is not None
            assert staged.tensors.keys() == wanted.keys()
            assert all(torch.equal(staged.tensors[name], wanted[name]) for name in wanted)
            staged.ack(0.0)
            stats = publisher.settle()
            assert stats is not None
            assert stats.nbytes >= sum(tensor.nbytes for tensor in wanted.values())
            assert list(stats.acked) == ["engine"]
        gang.close_publisher()


def test_verbs_out_of_order_and_foreign_losses_are_refused_and_break_nothing(gang, loss):
    with pytest.raises(StepOrderError, match="without a gradient"):
        gang.optim_step(1.0)
    with pytest.raises(BatchError, match="the ranks cannot be sent another one"):
        gang.forward_backward(batch(), lambda inputs: loss(inputs))
    gang.forward_backward(batch(), loss)
    with pytest.raises(StepOrderError, match="supervised_step between 1"):
        gang.supervised_step(batch(), 1e-3)
    gang.discard_gradient()
    gang.forward(batch())


BAD = {
    "tokens": lambda good: replace(good, tokens=good.tokens + 100_000),
    "row": lambda good: replace(good, prompt_lengths=good.prompt_lengths * 0),
    "column": lambda good: replace(good, fields={"loss_mask": good.fields["loss_mask"]}),
    "short column": lambda good: replace(
        good, fields=good.fields | {"advantages": good.fields["advantages"][:-1]}
    ),
    "routes": lambda good: replace(good, routes=torch.zeros(len(good.tokens), 2, 2, dtype=torch.int16)),
    "media": lambda good: replace(good, media=[[{"kind": "image"}]] * good.rows),
    "long row": lambda good: batch(lengths=[(3, 4), (100, 60)]),
    "dtype": lambda good: replace(good, tokens=good.tokens.int()),
    "marks": lambda good: replace(
        good, fields=good.fields | {"loss_mask": torch.full_like(good.fields["loss_mask"], 2)}
    ),
}


def test_a_bad_batch_is_refused_before_any_rank_sees_it_and_breaks_nothing(gang, alone, loss, tmp_path):
    good = batch()
    before = gang.forward(good)
    for what, spoiled in BAD.items():
        said = []
        for trainer in (gang, alone):
            with pytest.raises(BatchError) as refused:
                trainer.forward_backward(spoiled(good), loss)
            said.append(str(refused.value))
        assert said[0] == said[1], "one process and many say the same"
        if what != "column":  # which a forward does not read
            with pytest.raises(BatchError):
                gang.forward(spoiled(good))
    with pytest.raises(StepOrderError, match="without a gradient"):
        gang.optim_step(1.0)
    gang.forward_backward(good, loss)
    for scale in (0.0, float("inf"), float("nan")):
        with pytest.raises(BatchError, match="scale is"):
            gang.optim_step(scale)
    gang.discard_gradient()
    with pytest.raises(StateMissingError):
        gang.load(Path("/no such folder"))
    assert torch.equal(gang.forward(good), before)


def test_a_batch_of_nan_is_skipped_as_by_one_process_and_leaves_no_trace(gang, alone, loss, tmp_path):
    good = batch()
    gang.save(tmp_path / "before")
    for column in ("advantages", "rollout_logprobs"):
        for trainer in (gang, alone):
            broken = {column: torch.full_like(good.fields[column], torch.nan)}
            outputs = trainer.forward_backward(replace(good, fields={**good.fields, **broken}), loss)
            assert not torch.isfinite(outputs.loss)
            assert trainer.optim_step(1.0).skipped
    _, stats = step(gang, loss)
    assert not stats.skipped
    after = saved(gang, tmp_path / "after")
    gang.load(tmp_path / "before")
    step(gang, loss)
    require_close(saved(gang, tmp_path / "undisturbed"), after, 0.0)


def test_what_breaks_is_named_and_ends_all_ranks(running, kind):
    """The last test of a gang: one is killed, the other meets a fault that only its rank 1 has."""
    gang, _ = running
    (pid,) = gang.pids
    begun = time.monotonic()
    if kind == "sharded":
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(RankFailed, match=rf"rank 1 of 2 .*(pid {pid}|killed by signal 9)") as caught:
            gang.forward(batch())
    else:
        with pytest.raises(
            RankFailed, match=r"rank 1 of 2 failed in no such verb: ValueError: there is no verb"
        ) as caught:
            gang._call("no such verb", {}, lambda: None)
        assert "verbs.py" in str(caught.value), "the traceback of the rank"
    assert caught.value.rank == 1
    assert time.monotonic() - begun < 20
    with pytest.raises(RankFailed, match="in a gang that is broken"):
        gang.forward(batch())
