"""Engine and trainer agree on every sampled token, against the weights of the version that sampled it."""

import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from relax.backends.train.base import Packed
from relax.backends.train.settings import TrainerSettings
from relax.backends.train.torch_native import TorchNative
from relax.distributed.bus import Bus, Sample

TEMPERATURE = 0.8


@pytest.mark.parametrize(("mode", "staleness"), [("async", 1), ("async", 0), ("colocate", 0)])
def test_logprobs_agree_within_1e_4_across_updates(
    local: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, mode: str, staleness: int
) -> None:
    samples: list[Sample] = []
    versions: list[dict[str, torch.Tensor]] = []
    put = Bus.put_group

    async def recording_put(self: Bus, group: list[Sample], *where: Any) -> Any:
        samples.extend(group)
        return await put(self, group, *where)

    class Recording(TorchNative):
        """The real backend; it also keeps the weights of every version."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._keep()

        def _keep(self) -> None:
            versions.append({name: tensor.clone() for name, tensor in self.tensors()})

        def optim_step(self, scale: float) -> Any:
            stats = super().optim_step(scale)
            self._keep()
            return stats

    module = types.ModuleType("recording_backend")
    module.Recording = Recording  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "recording_backend", module)
    monkeypatch.setattr(Bus, "put_group", recording_put)
    run = local(
        "quickstart",
        f"mode={mode}",
        f"max_staleness={staleness}",
        "actor.backend=recording_backend:Recording",
        f"rollout.temperature={TEMPERATURE}",
        "rollout.prompts_per_step=4",
        "rollout.samples_per_prompt=4",
        "rollout.max_new_tokens=64",
        "actor.micro_batch_size=4",
        "actor.lr=1e-2",
        "steps=6",
    )
    assert len(samples) == 6 * 16
    judge = TorchNative(run.folder / "model", settings=TrainerSettings(lr=0.0, temperature=TEMPERATURE))
    worst, crossing, tokens = 0.0, 0, 0
    for version, weights in enumerate(versions):
        mine = [s for s in samples if version in s.policy_versions[:, 0]]
        if not mine:
            continue
        with torch.no_grad():
            for name, tensor in judge.tensors():
                tensor.copy_(weights[name])
        for sample in mine:
            fresh = judge.forward(packed(sample)).numpy()
            for sampled_by, start, end in sample.policy_versions.tolist():
                if sampled_by == version:
                    gap = np.abs(fresh[start:end] - sample.rollout_logprobs[start:end])
                    worst = max(worst, float(gap.max()))
                    tokens += end - start
            crossing += len(sample.policy_versions) > 1
    assert tokens == sum(int(s.loss_mask.sum()) for s in samples)
    assert worst <= 1e-4
    assert staleness == 0 or crossing > 0, "no generation crossed an update, so nothing was shown about it"


def packed(sample: Sample) -> Packed:
    return Packed(
        tokens=torch.as_tensor(np.asarray(sample.tokens)).long(),
        offsets=torch.tensor([0, len(sample.tokens)]),
        prompt_lengths=torch.tensor([sample.prompt_length]),
        media=[[]],
    )
