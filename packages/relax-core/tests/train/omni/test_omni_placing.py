"""Where images, video and sound stand in a row, against the model's own rotary index; and what is refused."""

import numpy as np
import pytest
import torch
from relax.backends.models import build_model
from relax.backends.train.errors import BatchError
from relax.backends.train.omni.items import shown_in
from relax.backends.train.omni.placing import Reading, place, sound_tokens
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import _get_feat_extract_output_lengths


@pytest.fixture(scope="module")
def model(omni_folder):
    return build_model(omni_folder)


@pytest.fixture(scope="module")
def reading(model):
    return Reading.of(model.config)


def placed(reading, tokens, items):
    return place(0, np.asarray(tokens, np.int64), shown_in(0, items), reading)


def test_a_sound_takes_as_many_tokens_as_transformers_says():
    frames = np.arange(1, 1200)
    expected = _get_feat_extract_output_lengths(torch.from_numpy(frames)).tolist()
    assert [sound_tokens(int(count), 50) for count in frames] == expected


@pytest.mark.parametrize("talking", [False, True])
def test_positions_are_those_of_the_models_own_index(model, reading, studio, talking):
    random = np.random.default_rng(int(talking))
    sounds = [studio.sound(seconds, seed) for seed, seconds in enumerate((0.05, 0.31, 0.97, 1.0, 2.24))]
    for _ in range(25):
        items, tokens = [], list(random.integers(10, 90, random.integers(1, 4)))
        for _ in range(random.integers(1, 5)):
            sound = sounds[random.integers(len(sounds))]
            video = studio.video(
                int(random.integers(1, 5)), 2 * int(random.integers(1, 12)), 2 * int(random.integers(1, 4)),
                float(random.choice([0.25, 0.4, 2 / 3, 1.0])),
            )  # fmt: skip
            image = studio.image(2 * int(random.integers(1, 5)), 2 * int(random.integers(1, 5)))
            shown = [image, sound, studio.talking(video, sound) if talking else video][random.integers(3)]
            items.append(shown)
            tokens += [*studio.marked(shown), *random.integers(10, 90, random.integers(3))]
        arguments = studio.arguments({"media": items})
        ids = torch.tensor([tokens])
        mask = arguments.get("feature_attention_mask")
        theirs, _ = model.get_rope_index(
            ids,
            arguments.get("image_grid_thw"),
            arguments.get("video_grid_thw"),
            torch.ones_like(ids),
            arguments["use_audio_in_video"],
            None if mask is None else mask.sum(-1),
            arguments.get("video_second_per_grid"),
        )
        ours = placed(reading, tokens, items)
        assert torch.equal(torch.from_numpy(ours.positions), theirs[:, 0])
        for kind, token in (("picture", None), ("sound", studio.audio_token)):
            places = np.concatenate([getattr(where, kind) for where in ours.placed])
            ids_there = np.asarray(tokens)[places]
            visual = (studio.image_token, studio.video_token)
            assert np.isin(ids_there, visual if token is None else (token,)).all()
            assert len(places) == np.isin(tokens, visual if token is None else (token,)).sum()


def test_a_stray_placeholder_is_text(reading, studio):
    sound = studio.sound(0.31)
    count = len(studio.marked(sound)) - 2
    stray = [20, studio.audio_token, 21, studio.audio_token, studio.video_token, 22]
    row = placed(reading, [*stray, *studio.marked(sound), studio.audio_token], [sound])
    assert np.array_equal(row.placed[0].sound, np.arange(len(stray) + 1, len(stray) + 1 + count))
    assert np.array_equal(
        row.positions, np.broadcast_to(np.arange(len(stray) + count + 3), (3, len(stray) + count + 3))
    )


def test_a_row_without_anything_counts_on(reading):
    assert placed(reading, [9, 8, 7], []).positions.tolist() == [[0, 1, 2]] * 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda s: [{"pixel_values": np.zeros((4, 6))}],
            r"holds \['pixel_values'\]; an Omni thinker is shown",
        ),
        (
            lambda s: [s.image() | {"image_grid_thw": np.asarray([1, 4, 2])}],
            r"shape \(16, 1536\).* means 8 patches",
        ),
        (
            lambda s: [s.video() | {"video_second_per_grid": np.asarray([0.0])}],
            r"video_second_per_grid of row 0 is \[0\.0\]; expected a number of seconds above 0",
        ),
        (
            lambda s: [s.sound(0.3) | {"feature_attention_mask": np.ones((1, 3))}],
            r"feature_attention_mask of row 0 has shape \(1, 3\); .* 1 sounds of 30 frames",
        ),
        (
            lambda s: [s.sound(0.3) | {"feature_attention_mask": np.zeros((1, 30))}],
            "a sound of row 0 has no frame",
        ),
        (
            lambda s: [s.sound(1.3)],
            r"item 0 of row 0, audio, needs a run of 17 audio tokens \(id 105\), but the row has 0",
        ),
        (lambda s: [s.image(2, 3)], "width in multiples of 2 patches"),
        (
            lambda s: [s.image(2, 2) | {"pixel_values": np.zeros((4, 7), np.float32)}],
            r"pixel_values of row 0 has shape \(4, 7\) of float32; .* 4 patches of",
        ),
        (
            lambda s: [s.sound(0.3) | {"input_features": np.zeros((1, 7, 30), np.float32)}],
            "item 0 of row 0, audio, has 7 mel bins; this model hears",
        ),
        (lambda s: [s.image(2, 2), s.image(8, 4)], r"item 1 of row 0, image, needs a run of 8 image tokens"),
    ],
)
def test_what_does_not_fit_is_refused(reading, studio, change, message):
    tokens = [11, *studio.marked(studio.image()), 12]
    with pytest.raises(BatchError, match=message):
        placed(reading, tokens, change(studio))


def test_lengths_may_stand_for_a_mask(studio):
    sound = studio.sound(0.31)
    features = sound["input_features"]
    padded = np.pad(features, ((0, 0), (0, 0), (0, 9)))
    told = {"input_features": padded, "audio_feature_lengths": np.asarray([features.shape[2]])}
    (a,), (b,) = shown_in(0, [sound]), shown_in(0, [told])
    assert a.sound is not None
    assert b.sound is not None
    assert a.sound.key == b.sound.key
