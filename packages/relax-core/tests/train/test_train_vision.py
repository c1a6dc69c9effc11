"""Rows with images: the same logprobs and gradients as the model's own forward, mixed with rows of text."""

import dataclasses

import numpy as np
import pytest
import torch
from relax.backends.models import build_model
from relax.backends.train.conformance import make_rows, pack, policy_gradient
from relax.backends.train.errors import BatchError
from relax.backends.train.settings import TrainerSettings
from relax.backends.train.torch_native import TorchNative

# Norms and rotary embeddings compute in float32 whatever the dtype: this is left of the 1e-10 of text.
FLOAT64 = 1e-7
VISION_START, VISION_END, IMAGE = 3, 4, 5
PATCH_VALUES = 3 * 2 * 16 * 16
GRIDS = {"small": (1, 2, 2), "wide": (1, 2, 4), "large": (1, 4, 4)}


def image(name: str, seed: int) -> dict:
    grid = np.asarray(GRIDS[name], np.int64)
    pixels = np.random.default_rng(seed).standard_normal((grid.prod(), PATCH_VALUES)).astype(np.float32)
    return {"kind": "image", "pixel_values": pixels, "image_grid_thw": grid}


def with_images(row: dict, images: list[dict]) -> dict:
    """Put images, each between its marks, after the first prompt token."""
    shown = []
    for item in images:
        shown += [VISION_START, *[IMAGE] * (int(item["image_grid_thw"].prod()) // 4), VISION_END]
    tokens = np.concatenate([row["tokens"][:1], np.asarray(shown, np.int64), row["tokens"][1:]])
    return row | {"tokens": tokens, "prompt_length": row["prompt_length"] + len(shown), "media": images}


@pytest.fixture
def rows():
    """Text, one image, two images, the first image again, text: no image token by chance."""
    plain = make_rows(90, [(3, 4), (2, 6), (4, 3), (5, 8), (1, 5)])
    plain = [row | {"tokens": row["tokens"] + 10} for row in plain]
    first, second, third = image("large", 1), image("wide", 2), image("small", 3)
    again = {name: value.copy() if name != "kind" else value for name, value in first.items()}
    media = [[], [first], [second, third], [again], []]
    return [with_images(row, images) for row, images in zip(plain, media, strict=True)]


def micro_batch(rows):
    return dataclasses.replace(pack(rows), media=[row["media"] for row in rows])


def plain_logprobs(model, row, temperature=0.8):
    tokens, prompt = torch.as_tensor(row["tokens"])[None], int(row["prompt_length"])
    media = {}
    if row["media"]:
        media = {
            "pixel_values": torch.cat([torch.as_tensor(item["pixel_values"]) for item in row["media"]]),
            "image_grid_thw": torch.stack([torch.as_tensor(item["image_grid_thw"]) for item in row["media"]]),
            "mm_token_type_ids": (tokens == IMAGE).int(),
        }
    logits = model(input_ids=tokens, use_cache=False, **media).logits[0, prompt - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(1, tokens[0, prompt:, None]).flatten()


def make(folder, dtype=torch.float32) -> TorchNative:
    return TorchNative(folder, settings=TrainerSettings(lr=1e-3, temperature=0.8), dtype=dtype)


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


def test_an_image_token_that_the_policy_sampled_is_text(vision_folder, rows):
    row = rows[1]
    sampled = row["tokens"].copy()
    sampled[[int(row["prompt_length"]) + 1, -1]] = IMAGE
    row = row | {"tokens": sampled}
    ours = make(vision_folder).forward(micro_batch([row]))
    # An engine decodes it token by token, as text whose positions go on: so does this cache.
    model = build_model(vision_folder).double()
    tokens, prompt = torch.as_tensor(row["tokens"])[None], int(row["prompt_length"])
    (item,) = row["media"]
    expected = []
    with torch.no_grad():
        outputs = model(
            input_ids=tokens[:, :prompt],
            mm_token_type_ids=(tokens[:, :prompt] == IMAGE).int(),
            pixel_values=torch.as_tensor(item["pixel_values"]),
            image_grid_thw=torch.as_tensor(item["image_grid_thw"])[None],
            use_cache=True,
        )
        for place in range(prompt, tokens.shape[1]):
            expected.append((outputs.logits[0, -1] / 0.8).log_softmax(-1)[tokens[0, place]])
            outputs = model(
                input_ids=tokens[:, place : place + 1],
                past_key_values=outputs.past_key_values,
                use_cache=True,
            )
    assert float((ours - torch.stack(expected)).abs().max()) < 1e-5


def test_a_vision_model_steps_on_text_alone_without_touching_the_tower(vision_folder, rows):
    trainer = make(vision_folder)
    # After an image its momentum would go on moving the tower, were a gradient of 0 left behind.
    for part, tower_moves in (([rows[0]], False), ([rows[1]], True), ([rows[4]], False)):
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
