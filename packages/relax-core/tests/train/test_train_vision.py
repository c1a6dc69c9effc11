"""Rows with images: the same logprobs and gradients as the model's own forward, mixed with rows of text."""

import dataclasses

import numpy as np
import pytest
import torch
from relax.algorithms import grpo
from relax.algorithms.settings import GRPOSettings
from relax.backends.models import build_model
from relax.backends.train.conformance import make_rows, pack, policy_gradient
from relax.backends.train.errors import BatchError
from relax.backends.train.settings import TrainerSettings
from relax.backends.train.torch_native import TorchNative

# Norms and rotary embeddings compute in float32 whatever the dtype: this is left of the 1e-10 of text.
FLOAT64 = 1e-7
TEMPERATURE = 0.8
VISION_START, VISION_END, IMAGE, VIDEO = 3, 4, 5, 6
UNSAMPLED = (IMAGE, VIDEO)
PATCH_VALUES = 3 * 2 * 16 * 16
SHOWN = 5
"""The row to which a tool shows an image."""
GRIDS = {"small": (1, 2, 2), "wide": (1, 2, 4), "large": (1, 4, 4)}


def image(name: str, seed: int) -> dict:
    grid = np.asarray(GRIDS[name], np.int64)
    pixels = np.random.default_rng(seed).standard_normal((grid.prod(), PATCH_VALUES)).astype(np.float32)
    return {"kind": "image", "pixel_values": pixels, "image_grid_thw": grid}


def marked(images: list[dict]) -> list[int]:
    shown = []
    for item in images:
        shown += [VISION_START, *[IMAGE] * (int(item["image_grid_thw"].prod()) // 4), VISION_END]
    return shown


def with_images(row: dict, images: list[dict]) -> dict:
    """Put images, each between its marks, after the first prompt token."""
    shown = marked(images)
    tokens = np.concatenate([row["tokens"][:1], np.asarray(shown, np.int64), row["tokens"][1:]])
    return row | {"tokens": tokens, "prompt_length": row["prompt_length"] + len(shown), "media": images}


def with_observation(row: dict, after: int, images: list[dict]) -> dict:
    """Let a tool show images, after so many response tokens: none of what it shows is sampled."""
    shown = marked(images)
    place = int(row["prompt_length"]) + after
    columns = {
        name: np.insert(row[name], after, np.zeros(len(shown), row[name].dtype))
        for name in ("loss_mask", "rollout_logprobs", "advantages")
    }
    tokens = np.insert(row["tokens"], place, shown)
    return row | columns | {"tokens": tokens, "media": [*row["media"], *images]}


@pytest.fixture
def rows():
    """Text, one image, two images, the first image again, text, an image and then one shown by a tool.

    No image token is there by chance.
    """
    plain = make_rows(90, [(3, 4), (2, 6), (4, 3), (5, 8), (1, 5), (3, 7)])
    plain = [row | {"tokens": row["tokens"] + 10} for row in plain]
    first, second, third = image("large", 1), image("wide", 2), image("small", 3)
    again = {name: value.copy() if name != "kind" else value for name, value in first.items()}
    media = [[], [first], [second, third], [again], [], [third]]
    found = [with_images(row, images) for row, images in zip(plain, media, strict=True)]
    found[SHOWN] = with_observation(found[SHOWN], 3, [second])
    return found


def micro_batch(rows):
    return dataclasses.replace(pack(rows), media=[row["media"] for row in rows])


def plain_logprobs(model, row):
    tokens, prompt = torch.as_tensor(row["tokens"])[None], int(row["prompt_length"])
    media = {}
    if row["media"]:
        media = {
            "pixel_values": torch.cat([torch.as_tensor(item["pixel_values"]) for item in row["media"]]),
            "image_grid_thw": torch.stack([torch.as_tensor(item["image_grid_thw"]) for item in row["media"]]),
            "mm_token_type_ids": (tokens == IMAGE).int(),
        }
    logits = model(input_ids=tokens, use_cache=False, **media).logits[0, prompt - 1 : -1]
    return response_logprobs(logits, tokens[0, prompt:])


def response_logprobs(logits, targets):
    """Logprobs over the tokens that a policy may say, in their own vocabulary; 0 for the others."""
    sayable = torch.tensor([token not in UNSAMPLED for token in range(logits.shape[-1])])
    found = torch.zeros(len(targets), dtype=logits.dtype)
    said = sayable[targets]
    places = (sayable.cumsum(0) - 1)[targets[said]]
    logprobs = (logits[said][:, sayable] / TEMPERATURE).log_softmax(-1)
    found[said] = logprobs.gather(1, places[:, None]).flatten()
    return found


def make(folder, dtype=torch.float32) -> TorchNative:
    return TorchNative(folder, settings=TrainerSettings(lr=1e-3, temperature=TEMPERATURE), dtype=dtype)


def gradients(model) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_logprobs_equal_the_models_own_forward_for_mixed_rows(vision_folder, rows):
    ours = make(vision_folder).forward(micro_batch(rows))
    model = build_model(vision_folder).double()
    with torch.no_grad():
        plain = torch.cat([plain_logprobs(model, row) for row in rows])
    assert float((ours - plain).abs().max()) < 1e-5


def test_the_images_matter(vision_folder, rows):
    trainer = make(vision_folder)
    before = trainer.forward(micro_batch(rows))
    changed = [
        row | {"media": [item | {"pixel_values": item["pixel_values"] + 1} for item in row["media"]]}
        for row in rows
    ]
    after = trainer.forward(micro_batch(changed))
    offsets = micro_batch(rows).response_offsets
    for index, row in enumerate(rows):
        moved = float((after - before)[offsets[index] : offsets[index + 1]].abs().max())
        assert (moved > 1e-3) == bool(row["media"]), f"row {index} moved by {moved}"


def test_gradients_equal_plain_transformers_also_in_the_vision_tower(vision_folder, rows):
    trainer = make(vision_folder, torch.float64)
    trainer.forward_backward(micro_batch(rows), policy_gradient)
    ours = gradients(trainer.model)
    model = build_model(vision_folder, torch.float64)
    for row in rows:
        ratio = (plain_logprobs(model, row) - torch.as_tensor(row["rollout_logprobs"])).exp()
        (-(torch.as_tensor(row["loss_mask"] * row["advantages"]) * ratio).sum()).backward()
    plain = gradients(model)
    assert ours.keys() == plain.keys()
    towers = [name for name in plain if ".visual." in name]
    assert len(towers) > 20
    still = [name for name in towers if float(plain[name].abs().max()) < 1e-9]
    # The last of the two deepstack layers adds behind the last decoder layer, at places that predict nothing.
    assert all("deepstack_merger_list.1." in name for name in still), still
    for name, gradient in plain.items():
        scale = max(1e-3, float(gradient.abs().max()))
        assert float((ours[name] - gradient).abs().max()) / scale < FLOAT64, name


def test_gradients_do_not_depend_on_which_rows_share_a_micro_batch(vision_folder, rows):
    trainer = make(vision_folder, torch.float64)
    found = []
    for split in ([rows], [rows[:2], rows[2:]], [[row] for row in rows]):
        trainer.model.zero_grad()
        for part in split:
            trainer.forward_backward(micro_batch(part), policy_gradient)
        found.append(torch.cat([gradient.flatten() for gradient in gradients(trainer.model).values()]))
    for other in found[1:]:
        assert float((other - found[0]).abs().max() / found[0].abs().max()) < FLOAT64


def test_an_image_that_a_group_shares_goes_through_the_tower_once(vision_folder, rows):
    trainer = make(vision_folder)
    patches = []
    trainer.model.model.visual.register_forward_pre_hook(lambda _, args: patches.append(len(args[0])))
    trainer.forward(micro_batch([rows[1]] * 8 + [rows[3]]))
    assert patches == [16]


def test_a_placeholder_that_the_policy_is_said_to_have_sampled_is_refused(vision_folder, rows):
    trainer = make(vision_folder)
    prompt = int(rows[2]["prompt_length"])
    for place, token in ((0, IMAGE), (2, VIDEO)):
        tokens = rows[2]["tokens"].copy()
        tokens[prompt + place] = token
        row = rows[2] | {"tokens": tokens, "loss_mask": np.asarray([1, 0, 1], np.uint8)}
        # Row 1 has no response: it starts where row 2 does.
        empty = {name: value[:0] for name, value in rows[0].items() if name in pack(rows).fields}
        empty |= {"tokens": rows[0]["tokens"][:3], "prompt_length": np.asarray(3), "media": []}
        batch = micro_batch([rows[1], empty, row])
        refused = rf"response token {place} of row 2 is {token}, which only stands for media .* loss_mask"
        for call in (
            trainer.forward,
            lambda batch: trainer.forward_backward(batch, policy_gradient),
            lambda batch: trainer.supervised_step(batch, 1e-3),
        ):
            with pytest.raises(BatchError, match=refused):
                call(batch)
    assert all(parameter.grad is None for parameter in trainer.model.parameters())


def test_a_placeholder_without_a_picture_behind_it_is_text_that_was_shown(vision_folder, rows):
    row = rows[1]
    tokens, mask = row["tokens"].copy(), row["loss_mask"].copy()
    strays = [1, len(mask) - 1]
    tokens[[int(row["prompt_length"]) + place for place in strays]] = IMAGE
    mask[strays] = 0
    row = row | {"tokens": tokens, "loss_mask": mask}
    ours = make(vision_folder).forward(micro_batch([row]))
    # A cache that is fed token by token takes it for text whose positions go on.
    model = build_model(vision_folder).double()
    ids, prompt = torch.as_tensor(tokens)[None], int(row["prompt_length"])
    (item,) = row["media"]
    expected = []
    with torch.no_grad():
        outputs = model(
            input_ids=ids[:, :prompt],
            mm_token_type_ids=(ids[:, :prompt] == IMAGE).int(),
            pixel_values=torch.as_tensor(item["pixel_values"]),
            image_grid_thw=torch.as_tensor(item["image_grid_thw"])[None],
            use_cache=True,
        )
        for place in range(prompt, ids.shape[1]):
            expected.append(response_logprobs(outputs.logits[0, -1:], ids[0, place : place + 1]))
            outputs = model(
                input_ids=ids[:, place : place + 1],
                past_key_values=outputs.past_key_values,
                use_cache=True,
            )
    assert float((ours - torch.cat(expected)).abs().max()) < 1e-5


def test_an_image_that_a_tool_shows_leaves_loss_and_gradient_finite(vision_folder, rows):
    trainer = make(vision_folder)
    row = rows[SHOWN]
    response = row["tokens"][int(row["prompt_length"]) :]
    assert (response == IMAGE).sum() == 2
    batch = micro_batch([row])
    logprobs = trainer.forward(batch)
    assert torch.isfinite(logprobs).all()
    assert torch.equal(logprobs == 0, torch.as_tensor(response == IMAGE))
    # A reference scores tokens alone: the mask is no business of its.
    assert torch.equal(trainer.forward(dataclasses.replace(batch, fields={})), logprobs)
    reference = dataclasses.replace(batch, fields={**batch.fields, "reference_logprobs": logprobs - 0.1})
    algorithm = grpo.make("grpo", GRPOSettings(kl_coef=0.1))
    assert torch.isfinite(trainer.forward_backward(reference, algorithm.loss).loss)
    assert all(bool(torch.isfinite(gradient).all()) for gradient in gradients(trainer.model).values())
    assert not trainer.optim_step(0.1).skipped
    assert 0 < trainer.supervised_step(batch, 1e-3) < np.inf
    assert all(bool(torch.isfinite(tensor).all()) for _, tensor in trainer.tensors())


def test_a_step_on_text_alone_moves_the_tower_by_its_moments(vision_folder, rows):
    """As where its gradient lies in a buffer that is reduced with others: on many ranks."""
    trainer = make(vision_folder)
    for part, tower_moves in (([rows[0]], False), ([rows[1]], True), ([rows[4]], True)):
        before = {name: tensor.clone() for name, tensor in trainer.tensors()}
        trainer.forward_backward(micro_batch(part), policy_gradient)
        trainer.optim_step(0.1)
        moved = any(not torch.equal(t, before[n]) for n, t in trainer.tensors() if ".visual." in n)
        assert moved == tower_moves
    state = trainer.state()
    again = make(vision_folder)
    again.load_state(state)
    for one in (trainer, again):
        one.forward_backward(micro_batch(rows), policy_gradient)
        one.optim_step(0.1)
    theirs = dict(again.tensors())
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in trainer.tensors())


def test_an_export_keeps_the_vision_model(vision_folder, rows, tmp_path):
    trainer = make(vision_folder)
    trainer.forward_backward(micro_batch(rows), policy_gradient)
    trainer.optim_step(0.1)
    trainer.export(tmp_path / "out")
    assert (tmp_path / "out" / "preprocessor_config.json").read_bytes() == (
        vision_folder / "preprocessor_config.json"
    ).read_bytes()
    again = make(tmp_path / "out")
    assert torch.equal(again.forward(micro_batch(rows)), trainer.forward(micro_batch(rows)))


@pytest.mark.parametrize(
    ("media", "message"),
    [
        ([image("small", 1), image("large", 2)], r"image 1 of row 0 needs a run of 4 image tokens \(id 5\)"),
        (
            [image("large", 1), image("small", 2)],
            r"image 1 of row 0 needs a run of 1 .* row has 4 .* \[4, 1\]",
        ),
        (
            [{"input_features": np.zeros(3)}],
            r"row 0 holds \['input_features'\]; this backend trains on images",
        ),
        (
            [image("small", 1) | {"image_grid_thw": np.asarray([1, 4, 4])}],
            r"shape \(4, 1536\).* means 16 patches",
        ),
    ],
)
def test_media_that_does_not_fit_its_placeholders_is_refused(vision_folder, rows, media, message):
    with pytest.raises(BatchError, match=message):
        make(vision_folder).forward(micro_batch([rows[1] | {"media": media}]))
