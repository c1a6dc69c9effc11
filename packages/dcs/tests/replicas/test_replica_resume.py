"""Training that goes on from replicas is the training that was never interrupted."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch


class Trainer:
    """A small model with everything that has state: dropout, AdamW, a schedule, and three random
    generators.
    """

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        self.numpy = np.random.default_rng(seed)
        self.order = torch.Generator().manual_seed(seed)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(16, 32), torch.nn.BatchNorm1d(32), torch.nn.Dropout(0.3), torch.nn.Linear(32, 4)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, amsgrad=True)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=20)
        self.steps = 0

    def step(self) -> bytes:
        """One step; returns the bits of its loss."""
        rows = torch.randperm(64, generator=self.order)[:8]
        data = torch.from_numpy(self.numpy.standard_normal((64, 16)).astype(np.float32))[rows]
        target = torch.tensor([random.randrange(4) for _ in range(8)])
        loss = torch.nn.functional.cross_entropy(self.model(data), target)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        self.steps += 1
        return loss.detach().numpy().tobytes()

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "torch": torch.get_rng_state(),
            "python": random.getstate(),
            "numpy": self.numpy.bit_generator.state,
            "order": self.order,
            "steps": self.steps,
        }

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        torch.set_rng_state(state["torch"])
        random.setstate(state["python"])
        self.numpy.bit_generator.state = state["numpy"]
        self.order = state["order"]
        self.steps = state["steps"]


@pytest.fixture
def random_states():
    kept = torch.get_rng_state(), random.getstate()
    yield
    torch.set_rng_state(kept[0])
    random.setstate(kept[1])


@pytest.mark.usefixtures("random_states")
@pytest.mark.parametrize("share_memory", [True, False], ids=["handed over", "sent"])
def test_losses_after_a_restore_equal_those_of_a_run_that_went_on(
    keeper: Callable[..., Any], replicas: Callable[..., Any], share_memory: bool
) -> None:
    whole = Trainer(seed=3)
    expected = [whole.step() for _ in range(16)]

    holder = keeper(share_memory=share_memory)
    trainer = Trainer(seed=3)
    first = replicas([holder])
    losses = []
    for step in range(1, 10):
        losses.append(trainer.step())
        first.save(step, trainer.state())  # the next step changes what was saved while it is on its way
    first.wait(9, 20)
    first.close()

    trainer = Trainer(seed=99)
    restored = replicas([holder]).restore()
    assert restored is not None
    assert restored[0] == 9
    trainer.load(restored[1])
    losses += [trainer.step() for _ in range(16 - 9)]
    assert losses == expected
    assert trainer.schedule.get_last_lr() == whole.schedule.get_last_lr()
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(trainer.model.state_dict()[name], tensor), name
