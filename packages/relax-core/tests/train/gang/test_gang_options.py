"""Shards with what torch_native can do beside the plain thing, held to one rank that does the same."""

import pytest
import torch
from relax.backends.train.conformance import make_rows, pack
from relax.backends.train.torch_native import TorchNative
from relax.backends.train.torch_native.trainer import options_of
from relax.config.roles import ActorSettings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def batch(seed: int):
    return pack(make_rows(60, [(3, 7), (8, 2), (1, 12), (5, 5), (2, 1)], seed))


@pytest.mark.parametrize(
    ("actor", "tolerance"),
    [
        ({"lora": {"rank": 4}}, 1e-4),
        ({"gradient_checkpointing": True, "packing": True, "rank_tokens": 12}, 1e-4),
        ({"dtype": "bfloat16"}, 0.2),
    ],
    ids=["adapter", "recomputed, packed, in pieces", "half precision"],
)
def test_shards_do_as_one_rank_does(start, text_folder, loss, tmp_path, actor, tolerance):
    settings = ActorSettings(data_parallel=2, **actor)
    with start(data_parallel=2, **actor) as gang:
        alone = TorchNative(
            text_folder,
            settings=gang.settings,
            dtype=getattr(torch, settings.dtype),
            options=options_of(settings),
        )
        for seed in range(2):
            for trainer in (gang, alone):
                outputs = trainer.forward_backward(batch(seed), loss)
                trainer.optim_step(1 / outputs.count)
        ours = gang.forward(batch(7))
        torch.testing.assert_close(ours, alone.forward(batch(7)), rtol=0, atol=tolerance)
        gang.export(tmp_path / "export")
        gang.save(tmp_path / "state")
        gang.load(tmp_path / "state")
        assert torch.equal(gang.forward(batch(7)), ours)
    exported = TorchNative(tmp_path / "export", settings=gang.settings, dtype=getattr(torch, settings.dtype))
    torch.testing.assert_close(exported.forward(batch(7)), ours, rtol=0, atol=max(1e-5, tolerance / 4))
