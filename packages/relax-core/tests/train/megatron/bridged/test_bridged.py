"""A family that only megatron-bridge maps (Mistral): held to transformers, weights both ways.

Needs megatron-bridge in .engines/megatron-bridge (make engines); Transformer Engine is replaced, see rank.py.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from relax.backends.train.conformance import make_rows, pack, policy_gradient
from relax.backends.train.settings import TrainerSettings
from relax.backends.train.torch_native import TorchNative
from safetensors.torch import load_file

HERE = Path(__file__).parent
SITE = HERE.parents[5] / ".engines" / "megatron-bridge"
SETTINGS = TrainerSettings(lr=1e-3, temperature=0.9)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not SITE.is_dir(), reason="megatron-bridge is not installed: make engines"),
]


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def folder(request, tmp_path_factory) -> Path:
    from transformers import MistralConfig, MistralForCausalLM

    made = tmp_path_factory.mktemp("mistral")
    config = MistralConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        sliding_window=None,
        tie_word_embeddings=request.param,
        architectures=["MistralForCausalLM"],
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = MistralForCausalLM(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(4.0) if parameter.ndim > 1 else parameter.add_(
                    0.1 * torch.randn_like(parameter)
                )
    model.save_pretrained(made)
    return made


def run(folder: Path, out: Path, actor: dict, world: int = 2) -> list[dict]:
    paths = [str(HERE.parent / "shim"), os.environ.get("PYTHONPATH", ""), str(SITE)]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONWARNINGS": "ignore",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, str(HERE / "rank.py"), str(rank), str(world), str(out / "store"), str(folder),
             str(out), json.dumps(actor)],
            env=environment,
            stdout=(out / f"log.{rank}").open("w"),
            stderr=subprocess.STDOUT,
        )
        for rank in range(world)
    ]  # fmt: skip
    try:
        for rank, process in enumerate(ranks):
            assert process.wait(400) == 0, (out / f"log.{rank}").read_text()[-3000:]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    return [json.loads((out / f"told.{rank}.json").read_text()) for rank in range(world)]


def scores(out: Path, name: str) -> dict[str, torch.Tensor]:
    found = {}
    for path in out.glob(f"{name}.*"):
        found |= load_file(path)
    return found


@pytest.mark.parametrize(
    "actor",
    [
        {"tensor_parallel": 2},
        {"pipeline_parallel": 2},
        {"pipeline_parallel": 2, "virtual_pipeline": 2},
        {"data_parallel": 2},
    ],
    ids=str,
)
def test_a_bridged_model_trains_as_transformers_does(folder, actor, tmp_path):
    told = run(folder, tmp_path, actor)
    work = [pack(make_rows(97, [(3, 7), (8, 2), (1, 12)], seed)) for seed in range(2)]
    plain = TorchNative(folder, settings=SETTINGS)
    replicas = actor.get("data_parallel", 1)

    def expected() -> dict[str, torch.Tensor]:
        return {
            f"{index % replicas}.{index // replicas}": plain.forward(batch)
            for index, batch in enumerate(work)
        }

    def require(name: str) -> None:
        found = scores(tmp_path, name)
        assert found.keys() == expected().keys()
        for key, value in expected().items():
            torch.testing.assert_close(found[key], value, rtol=0, atol=2e-5, msg=f"{name} {key}")

    require("before")
    published = {}
    for rank in range(2):
        part = load_file(tmp_path / f"published.{rank}")
        assert part, "each rank publishes some"
        assert not part.keys() & published.keys(), "a tensor is one rank's"
        published |= part
    weights = dict(plain.tensors())
    assert published.keys() == weights.keys()
    assert all(torch.equal(published[name], weights[name]) for name in weights), "back bit for bit"

    loss = sum(float(plain.forward_backward(batch, policy_gradient).loss) for batch in work)
    norm = plain.optim_step(1 / 40).grad_norm
    assert sum(one["loss"] for one in told if one["loss"] is not None) == pytest.approx(loss, rel=1e-4)
    assert [one["norm"] for one in told] == pytest.approx([norm] * 2, rel=1e-4)
    exported = TorchNative(tmp_path / "export", settings=SETTINGS)
    for (name, ours), (_, theirs) in zip(exported.tensors(), plain.tensors(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-4, msg=name)  # Adam at gradients near 0
    plain = exported  # from here on the same weights, bit for bit
    require("after")
    require("loaded")
