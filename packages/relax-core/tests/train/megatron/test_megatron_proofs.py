"""A checkpoint of one rank a layer loads cut in two, either way, and balancing losses are what papers say."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter, load_balancing_loss_func

# The first test of a session starts the ranks that all of them share: a minute on a busy machine.
pytestmark = pytest.mark.timeout(300)

VOCABULARY = 101
WHOLE, TENSOR, PIPELINE = {"data_parallel": 2}, {"tensor_parallel": 2}, {"pipeline_parallel": 2}


def _scores(answers: list[dict[str, Any]], replicas: int) -> list[torch.Tensor]:
    """Logprobs of every micro-batch, in order; replica r is given every `replicas`-th from r on."""
    spoken = [[torch.tensor(part) for part in one["scores"]] for one in answers if one["scores"] is not None]
    assert len(spoken) == replicas
    return [spoken[index % replicas][index // replicas] for index in range(sum(map(len, spoken)))]


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        pytest.param(WHOLE, TENSOR, id="TP1 to TP2"),
        pytest.param(WHOLE, PIPELINE, id="TP1 to PP2"),
        pytest.param(PIPELINE, WHOLE, id="PP2 to TP1"),
        pytest.param(TENSOR, WHOLE, id="TP2 to TP1", marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_loads_under_another_split_with_equal_logits(
    saved: dict[str, int],
    loaded: dict[str, int],
    two: Any,
    model: Callable[..., str],
    tmp_path: Path,
) -> None:
    folder, out = model("qwen3"), str(tmp_path / "state")
    first = two("train_and_save", folder=folder, actor=saved, out=out, vocabulary=VOCABULARY, steps=2)
    then = two("load_and_go_on", folder=folder, actor=loaded, out=out, vocabulary=VOCABULARY)
    ours, theirs = (
        _scores(answers, actor.get("data_parallel", 1)) for answers, actor in ((first, saved), (then, loaded))
    )
    assert len(ours) == len(theirs) == 4
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=2e-6)
    # And the optimizer with them: the next step has the same gradient.
    assert first[0]["norm"] == pytest.approx(then[0]["norm"], rel=1e-5)
    assert first[0]["steps"] == then[0]["steps"] == 3


def _expected(
    process_module: Callable[[str], Any],
    folder: str,
    count: int,
    of: Callable[[list[torch.Tensor]], torch.Tensor],
) -> dict[str, Any]:
    """Gradient of the sum over micro-batches of (marked tokens) x (a loss of the routers' logits), from
    transformers in float64.
    """
    oracle, problem = process_module("oracle"), process_module("problem")
    model = oracle.load(folder)
    seen: dict[int, list[torch.Tensor]] = {}
    routers = [module for module in model.modules() if isinstance(module, Qwen3MoeTopKRouter)]

    def listen(layer: int, router: torch.nn.Module) -> None:
        router.register_forward_hook(lambda *call: seen.setdefault(layer, []).append(call[2][0]))

    for layer, router in enumerate(routers):
        listen(layer, router)
    for batch in problem.batches(12, VOCABULARY, count):
        seen.clear()
        bounds = batch.offsets.tolist()
        marks = batch.fields["loss_mask"].split(batch.response_offsets.diff().tolist())
        assert all(part.any() for part in marks), "a row that nothing is learnt from counts for no balance"
        for first, last in itertools.pairwise(bounds):
            model(input_ids=batch.tokens[None, first:last], use_cache=False)
        logits = [torch.cat(parts).double() for _, parts in sorted(seen.items())]
        assert [len(part) for part in logits] == [len(batch.tokens)] * len(routers)
        (int(batch.fields["loss_mask"].sum()) * of(logits)).backward()
    return oracle.split(
        {name: p.grad for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    )


def _switch(logits: list[torch.Tensor], top_k: int, experts: int) -> torch.Tensor:
    """Sum over layers of E / k x sum over experts of (share of tokens) x (mean probability): equation 4 of
    arXiv 2101.03961, for top-k; 1 where all is balanced.
    """
    total = torch.zeros((), dtype=torch.float64)
    for layer in logits:
        probabilities = layer.softmax(-1)
        chosen = torch.zeros_like(layer).scatter(1, layer.topk(top_k).indices, 1.0)
        total = total + experts / top_k * (chosen.mean(0) * probabilities.mean(0)).sum()
    return total


def _z(logits: list[torch.Tensor]) -> torch.Tensor:
    """Sum over layers of the mean square of the log of the partition sum: equation 5 of arXiv 2202.08906."""
    return sum((layer.logsumexp(-1).square().mean() for layer in logits), torch.zeros(()).double())


COEFFICIENT = 0.3


@pytest.mark.parametrize(
    ("actor", "count"),
    [
        pytest.param({"data_parallel": 2}, 2, id="replicas"),
        pytest.param({"data_parallel": 2, "expert_parallel": 2}, 2, id="experts", marks=pytest.mark.slow),
        pytest.param({"pipeline_parallel": 2}, 1, id="pipeline", marks=pytest.mark.slow),
        pytest.param({"context_parallel": 2}, 1, id="context", marks=pytest.mark.slow),
        pytest.param({"tensor_parallel": 2}, 1, id="tensor"),
    ],
)
@pytest.mark.parametrize("kind", ["aux_loss", "z_loss"])
def test_balancing_losses_have_the_gradient_of_their_equations(
    kind: str,
    actor: dict[str, Any],
    count: int,
    two: Any,
    model: Callable[..., str],
    process_module: Callable[[str], Any],
    tmp_path: Path,
) -> None:
    folder = model("qwen3_moe")  # 4 experts, 2 a token, 2 layers
    megatron = {kind: COEFFICIENT, "sequence_parallel": "tensor_parallel" in actor}
    two(
        "balanced",
        folder=folder,
        actor={**actor, "megatron": megatron},
        out=str(tmp_path),
        vocabulary=VOCABULARY,
        count=count,
    )

    def plain(logits: list[torch.Tensor]) -> torch.Tensor:
        return COEFFICIENT * (_switch(logits, 2, 4) if kind == "aux_loss" else _z(logits))

    expected = _expected(process_module, folder, count, plain)
    found = load_file(tmp_path / "grads")
    routers = [name for name in expected if name.endswith("mlp.gate.weight")]
    assert len(routers) == 2
    assert all(float(expected[name].abs().max()) > 1e-3 for name in routers)
    for name, gradient in found.items():
        wanted = expected.get(name, torch.zeros_like(gradient))
        scale = max(1.0, float(wanted.abs().max()))
        torch.testing.assert_close(gradient.double(), wanted.double(), rtol=0, atol=2e-5 * scale, msg=name)


def test_the_balancing_loss_is_that_of_transformers_where_both_say_the_same() -> None:
    """transformers pools the layers, and leaves the k out: for one layer it is k times the equation."""
    logits = torch.randn(50, 4, generator=torch.Generator().manual_seed(3)).double()
    theirs = load_balancing_loss_func((logits,), num_experts=4, top_k=2)
    assert isinstance(theirs, torch.Tensor)
    torch.testing.assert_close(2 * _switch([logits], 2, 4), theirs.double())


def test_a_family_that_only_megatron_bridge_maps_is_refused_by_its_name_where_that_is_not_installed(
    two: Any, tmp_path: Path
) -> None:
    from transformers import MistralConfig

    MistralConfig(num_hidden_layers=2, architectures=["MistralForCausalLM"]).save_pretrained(tmp_path)
    for told in two("unmapped", folder=str(tmp_path)):
        assert "model type 'mistral' is none that the megatron backend maps itself" in told
        assert "Install megatron-bridge" in told
        assert "actor.backend=torch_native" in told
