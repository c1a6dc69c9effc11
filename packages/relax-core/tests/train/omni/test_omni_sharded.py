"""FSDP2 ranks that are shown different things train as one rank does: no tower waits for another rank."""

import pytest
import torch
from relax import algorithms
from relax.backends.train.gang.gang import Gang
from relax.backends.train.gang.processes import RankProcess
from relax.backends.train.gang.seat import Seat, Task
from relax.backends.train.settings import TrainerSettings
from relax.backends.train.torch_native import TorchNative
from relax.config.roles import ActorSettings


@pytest.mark.slow
def test_ranks_that_are_shown_different_things_train_as_one(omni_folder, whole_folder, studio, tmp_path):
    settings = TrainerSettings(lr=1e-3, temperature=studio.temperature, clip_grad_norm=None)
    loss = algorithms.build("grpo", {}).loss
    rows = studio.rows()
    batches = [studio.batch(part) for part in ([rows[2], rows[0]], [rows[1], rows[6]], [rows[5], rows[4]])]
    for folder in (omni_folder, whole_folder):
        task = Task(
            folder,
            settings,
            ActorSettings(data_parallel=2, fsdp=True),
            ("grpo", {}),
            timeout=60.0,
            start_seconds=110,
        )
        seat = Seat(task)
        logs = tmp_path / folder.name
        logs.mkdir()
        gang = Gang(seat, loss, [RankProcess(seat.address, seat.token, 1, logs / "rank-1.log")])
        try:
            alone = TorchNative(folder, settings=settings)
            for batch in batches:
                torch.testing.assert_close(gang.forward(batch), alone.forward(batch), rtol=0, atol=1e-5)
            for batch in batches:
                ours, theirs = (trainer.forward_backward(batch, loss) for trainer in (gang, alone))
                assert float(ours.loss) == pytest.approx(float(theirs.loss), abs=1e-5)
            assert gang.optim_step(0.05).grad_norm == pytest.approx(
                alone.optim_step(0.05).grad_norm, rel=1e-5
            )
            gang.export(logs / "exported")
            exported = TorchNative(logs / "exported", settings=settings)
            for batch in batches:
                torch.testing.assert_close(exported.forward(batch), gang.forward(batch), rtol=0, atol=1e-5)
        finally:
            gang.close()
