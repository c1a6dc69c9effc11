"""What a model takes, said from its config.json alone: every kind of bad batch has a sentence of its own."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from relax.backends.tiny import write_tiny
from relax.backends.train.admission import TRAINED, admission_of
from relax.backends.train.conformance import make_rows, pack
from relax.backends.train.errors import BatchError, UntrainableModelError


@pytest.fixture(scope="module")
def admission(tmp_path_factory):
    folder = tmp_path_factory.mktemp("moe")
    write_tiny(folder, "qwen3_moe", max_position_embeddings=64)
    return admission_of(folder)


@pytest.fixture
def batch(admission):
    made = pack(make_rows(50, [(3, 7), (8, 2)]))
    layers, top_k = len(admission.routing.layers), admission.routing.top_k
    chosen = torch.rand(len(made.tokens), layers, admission.routing.experts).argsort(-1)[..., :top_k]
    chosen[made.offsets[1:] - 1] = -1
    return replace(made, routes=chosen.to(torch.int16))


def test_a_good_batch_is_taken_with_and_without_routes(admission, batch):
    admission.admit(batch, TRAINED)
    admission.admit(replace(batch, routes=None), TRAINED)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda b: replace(b, tokens=b.tokens - 100), "token ids run from -"),
        (lambda b: replace(b, routes=b.routes[:-1]), "routes have shape"),
        (lambda b: replace(b, routes=b.routes[:, :1]), "captured from another model"),
        (lambda b: replace(b, routes=b.routes + 100), "this model has 0 to"),
        (lambda b: replace(b, routes=b.routes - 2), "stands for no route"),
        (lambda b: replace(b, routes=_with(b.routes, 0, -1)), "only a part of its experts"),
        (lambda b: replace(b, routes=_with(b.routes, 0, b.routes[0, 0, 1])), "an expert twice"),
        (lambda b: replace(b, media=[[{"kind": "audio"}], []]), "no token of it stands for any"),
        (lambda b: replace(b, media=[[]]), "media lists 1 rows"),
        (lambda b: replace(b, routes=b.routes.float()), "have to be signed integers"),
        (lambda b: replace(b, tokens=b.tokens.int()), "tokens is torch.int32 of shape"),
        (lambda b: replace(b, tokens=b.tokens[None]), "one row of int64"),
        (lambda b: replace(b, offsets=b.offsets[:0]), "offsets is empty; 2 rows need 3"),
        (lambda b: _column(b, loss_mask=b.fields["loss_mask"] * 2), "loss_mask of response token 0 is 2"),
        (lambda b: _column(b, advantages=b.fields["loss_mask"]), "'advantages' is torch.uint8"),
    ],
)
def test_each_kind_of_bad_batch_is_named(admission, batch, spoil, message):
    with pytest.raises(BatchError, match=message):
        admission.admit(spoil(batch), TRAINED)


def test_the_encoded_original_of_an_item_is_dropped_before_anything_looks_at_it(tmp_path: Path):
    write_tiny(tmp_path, "qwen3_vl")
    admission = admission_of(tmp_path)
    made = pack(make_rows(50, [(8, 3), (2, 2)], unsampled=admission.unsampled))
    made.tokens[1:5] = admission.unsampled[0]
    image = {
        "kind": "image",
        "pixel_values": np.zeros((16, 3 * 2 * 16 * 16), np.float32),
        "image_grid_thw": np.asarray([[1, 4, 4]]),
    }
    with_file = replace(made, media=[[image | {"file": np.zeros(9, np.uint8)}], []])
    (item,), text = admission.admit(with_file).media
    assert item == image
    assert not text
    with pytest.raises(BatchError, match=r"row 0 holds \['image_grid_thw', 'other', 'pixel_values'\]"):
        admission.admit(replace(made, media=[[image | {"other": np.zeros(9, np.uint8)}], []]))
    with pytest.raises(BatchError, match="is a str; it has to map names to arrays"):
        admission.admit(replace(made, media=[["image"], []]))


def test_routes_for_a_dense_model_and_sampled_placeholders_are_refused(tmp_path: Path, batch):
    write_tiny(tmp_path / "dense", "qwen3")
    with pytest.raises(BatchError, match="no experts to route to"):
        admission_of(tmp_path / "dense").admit(batch)
    write_tiny(tmp_path / "seeing", "qwen3_vl")
    seeing = admission_of(tmp_path / "seeing")
    shown = replace(batch, routes=None, tokens=batch.tokens.clone())
    shown.tokens[4] = seeing.unsampled[0]  # the second response token of the first row
    shown.fields["loss_mask"].fill_(1)
    with pytest.raises(BatchError, match=r"response token 1 of row 0 .* only stands for media"):
        seeing.admit(shown)


def test_a_folder_without_a_model_is_named(tmp_path: Path):
    with pytest.raises(UntrainableModelError, match=r"has no config\.json"):
        admission_of(tmp_path)


def _column(batch, **column):
    return replace(batch, fields=batch.fields | column)


def _with(routes, token, expert):
    changed = routes.clone()
    changed[token, 0, 0] = expert
    return changed
