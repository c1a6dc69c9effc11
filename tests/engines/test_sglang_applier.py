"""A real SGLang server on CPUs follows a trainer: it computes with each version, whatever way that took."""

import runpy
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import dcs
import pytest
import torch
from dcs.appliers import SglangApplier
from transformers import Qwen3Config, Qwen3ForCausalLM

pytestmark = pytest.mark.timeout(600)  # the server starts within the first test

ROOT = Path(__file__).parents[2]
Mode = Literal["tensor", "distributed", "disk"]
PROMPT = list(range(10, 26))
TOLERANCE = 1e-4
BUCKET_BYTES = 200_000
"""Three buckets."""

torch.set_num_threads(1)


def tiny(seed: int, hidden_size: int = 64) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=256,
        hidden_size=hidden_size,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        dtype="float32",
    )
    return Qwen3ForCausalLM(config).eval()


@dataclass(frozen=True)
class Handmade:
    """A version as an applier sees it."""

    version: int
    tensors: dict[str, torch.Tensor]
    epoch: int = 1


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny-qwen3")
    tiny(seed=0).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def server(launch_sglang: Callable[..., Any], model_folder: Path) -> Iterator[Any]:
    launched = launch_sglang(model_folder)
    yield launched
    # Updates from disk rename the model that a server serves; name it again as it was.
    launched.post("/update_weights_from_disk", {"model_path": str(model_folder)})


@pytest.fixture
def trainer() -> Qwen3ForCausalLM:
    return tiny(seed=0)


def step(model: torch.nn.Module, seed: int) -> None:
    """A change of all weights that is easy to see in what the model says."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)


def disagreement(server: Any, model: Qwen3ForCausalLM) -> float:
    """How far the server's log probabilities of its own sample are from the model's, at most."""
    return disagreement_of(server.generate(PROMPT, 12), model)


def disagreement_of(answer: Any, model: Qwen3ForCausalLM) -> float:
    sampled = answer["output_ids"]
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT + sampled])).logits[0, len(PROMPT) - 1 : -1]
    mine = torch.log_softmax(logits, -1)[range(len(sampled)), sampled]
    theirs = torch.tensor([entry[0] for entry in answer["meta_info"]["output_token_logprobs"]])
    return (mine - theirs).abs().max().item()


@pytest.mark.parametrize("mode", ["tensor", "distributed", "disk"])
def test_a_server_computes_with_each_of_three_versions(
    mode: Mode, server: Any, model_folder: Path, trainer: Qwen3ForCausalLM, capsys: pytest.CaptureFixture[str]
) -> None:
    run = f"three-{mode}"
    pauses: list[float] = []
    with (
        dcs.Coordinator() as coordinator,
        dcs.Publisher(coordinator.address, run=run, layout=dcs.layout.of(trainer)) as publisher,
        SglangApplier(server.url, mode=mode, model=model_folder, bucket_bytes=BUCKET_BYTES) as applier,
        dcs.Subscriber(coordinator.address, run=run, name="sglang-0", layout=applier.layout) as subscriber,
    ):
        follower = subscriber.follow(applier)
        for version in (1, 2, 3):
            step(trainer, seed=10 * version + len(mode))
            assert disagreement(server, trainer) > 0.01  # it has not heard of this version
            ticket = publisher.publish(version, trainer.state_dict())
            assert follower.wait_for(version, timeout=60.0) == version
            ticket.wait(timeout=60.0)
            answer = server.generate(PROMPT, 12)
            assert answer["meta_info"]["weight_version"] == str(version)
            assert disagreement_of(answer, trainer) < TOLERANCE
            assert applier.last is not None
            assert (applier.last.version, applier.last.nbytes) == (version, 4 * trainer.num_parameters())
            pauses.append(applier.last.pause_seconds)
    with capsys.disabled():
        milliseconds = ", ".join(f"{1e3 * pause:.0f}" for pause in pauses)
        print(f"\nSGLang paused by mode={mode} for {milliseconds} ms, receiving included")


def test_requests_that_run_go_on_with_the_new_weights(
    server: Any, model_folder: Path, trainer: Qwen3ForCausalLM
) -> None:
    """`retract` recomputes what a request has so far, so nothing it says later is of the old weights."""
    step(trainer, seed=1)
    with SglangApplier(server.url, model=model_folder) as applier:
        applier(Handmade(100, trainer.state_dict()))
        with server.stream(PROMPT, 400) as chunks:
            assert len(next(chunks)["output_ids"]) < 400
            step(trainer, seed=2)
            applier(Handmade(101, trainer.state_dict()))
            *_, answer = chunks
    assert len(answer["output_ids"]) == 400
    versions = [span["version"] for span in answer["meta_info"]["weight_versions"]]
    assert versions == ["100", "101"]


def test_a_layout_of_another_model_is_refused_and_the_server_serves_on(
    server: Any, model_folder: Path, trainer: Qwen3ForCausalLM
) -> None:
    other = tiny(seed=0, hidden_size=32)
    before = server.weights()
    with SglangApplier(server.url, model=model_folder) as applier:
        with (
            dcs.Coordinator() as coordinator,
            dcs.Publisher(coordinator.address, run="other", layout=dcs.layout.of(other)),
            pytest.raises(dcs.LayoutMismatch, match=r"lm_head\.weight"),
            dcs.Subscriber(coordinator.address, run="other", name="sglang-0", layout=applier.layout),
        ):
            pass
        with pytest.raises(dcs.LayoutMismatch, match="nothing was touched"):
            applier(Handmade(200, other.state_dict()))
        with pytest.raises(dcs.LayoutMismatch, match=r"lm_head.weight.*is absent"):
            applier(Handmade(200, {k: v for k, v in trainer.state_dict().items() if k != "lm_head.weight"}))
        with pytest.raises(dcs.LayoutMismatch, match="bfloat16"):
            applier(Handmade(200, {k: v.bfloat16() for k, v in trainer.state_dict().items()}))
        assert applier.usable
    with pytest.raises(dcs.LayoutMismatch, match=r"lm_head\.weight"):
        SglangApplier(server.url, model=model_folder, layout=dcs.layout.of(other))
    assert server.weights() == before
    assert len(server.generate(PROMPT, 12)["output_ids"]) == 12


def test_a_server_that_was_left_half_way_stays_paused_until_a_whole_version_comes(
    server: Any, model_folder: Path, trainer: Qwen3ForCausalLM
) -> None:
    tensors = trainer.state_dict()
    broken = SglangApplier(server.url, model=model_folder, bucket_bytes=BUCKET_BYTES)
    broken(Handmade(300, tensors))
    # The server leaves the group behind the applier's back, and refuses the next bucket.
    server.post("/destroy_weights_update_group", {"group_name": broken._transport._name})  # pyright: ignore
    step(trainer, seed=3)
    with pytest.raises(dcs.ApplyFailed, match="left paused"):
        broken(Handmade(301, tensors))
    assert not broken.usable
    with pytest.raises(dcs.ApplyFailed, match="earlier version failed"):
        broken(Handmade(302, tensors))
    broken.close()  # does not wait for a broadcast that nobody takes

    answers: list[Any] = []
    request = threading.Thread(target=lambda: answers.append(server.generate(PROMPT, 12)))
    request.start()
    request.join(1.0)
    assert request.is_alive()  # nothing is served of a mix
    with SglangApplier(server.url, model=model_folder) as healing:
        healing(Handmade(303, tensors))
    request.join(60.0)
    assert disagreement_of(answers[0], trainer) < TOLERANCE


def test_the_recipe_trains_and_serves(
    server: Any, model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = runpy.run_path(str(ROOT / "recipes" / "dcs_pytorch_sglang.py"))
    recipe["main"](str(model_folder), server.url)
    lines = [line for line in capsys.readouterr().out.splitlines() if "agree within" in line]
    assert [line.split(":")[0] for line in lines] == ["version 1", "version 2", "version 3"]
    assert all(float(line.split()[-1]) < TOLERANCE for line in lines)
