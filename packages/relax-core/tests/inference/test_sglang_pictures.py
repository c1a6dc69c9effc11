"""Pictures on their way to SGLang: files of which a processor makes the very tensors of the request again."""

import base64
import gc
import io
import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from agentic import GenerationRequest, Sampling
from omni_processor import OmniProcessor
from PIL import Image
from relax.backends.inference.errors import EngineError, InvalidRequest
from relax.backends.inference.sglang.answers import Answer, Piece
from relax.backends.inference.sglang.model import ServedModel
from relax.backends.inference.sglang.pictures import PictureRules, Pictures, at_version
from relax.backends.inference.sglang.requests import body
from relax.backends.tiny import write_tiny
from transformers import AutoImageProcessor

RECORDED = json.loads((Path(__file__).parent / "data" / "sglang_0.5.23_pictures.json").read_text())
SIZES = [(64, 64), (32, 96), (31, 97), (70, 50), (8, 300)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("vision"), "qwen3_vl")


@pytest.fixture(scope="module")
def rules(folder: Path) -> PictureRules:
    found = PictureRules.read(folder, json.loads((folder / "config.json").read_text()))
    assert found is not None
    return found


@pytest.fixture(scope="module")
def model(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return ServedModel.read(folder, "float32", tmp_path_factory.mktemp("completed"), 0)


@pytest.fixture(scope="module")
def shown(folder: Path) -> GenerationRequest:
    """A request with all the sizes, by the run's processor."""
    random = np.random.default_rng(0)
    pictures = [Image.fromarray(random.integers(0, 256, (*size, 3), dtype=np.uint8)) for size in SIZES]
    content: list[dict[str, Any]] = [{"type": "image", "image": picture} for picture in pictures]
    sample = OmniProcessor.from_pretrained(folder)([{"role": "user", "content": content}])
    return GenerationRequest("r", sample.tokens, Sampling(), 0, list(sample.media))


def changed(request: GenerationRequest, media: list[Any], tokens: Any = None) -> GenerationRequest:
    tokens = request.tokens if tokens is None else np.asarray(tokens, np.int32)
    return GenerationRequest(request.id, tokens, request.sampling, 0, media)


def decoded(file: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(file)))


def test_a_processor_that_does_not_resize_makes_the_same_tensors_of_the_files(folder, rules, shown):
    rules.check(shown)
    files = [at_version(file, 3) for file in Pictures(rules).of(shown)]
    processor = AutoImageProcessor.from_pretrained(folder)
    made = processor(images=[decoded(file) for file in files], return_tensors="np", do_resize=False)
    ours = np.concatenate([item["pixel_values"] for item in shown.media])
    assert np.abs(made["pixel_values"] - ours).max() <= 1e-6
    assert made["image_grid_thw"].tolist() == [item["image_grid_thw"][0].tolist() for item in shown.media]


def test_means_and_deviations_of_each_channel_are_undone(rules):
    odd = PictureRules(rules.token, 16, 2, 2, (0.48, 0.45, 0.4), (0.26, 0.27, 0.28), 1 / 255)
    levels = np.random.default_rng(1).integers(0, 256, (32, 64, 3), dtype=np.uint8)
    scaled = ((levels / 255 - odd.mean) / odd.std).astype(np.float32).transpose(2, 0, 1)
    blocks = scaled.reshape(3, 1, 2, 16, 2, 2, 16).transpose(1, 4, 2, 5, 0, 3, 6).reshape(8, 3, 1, 256)
    pixels = np.repeat(blocks, 2, axis=2).reshape(8, -1)
    found = odd.levels(pixels, np.array([1, 2, 4]))
    assert found is not None
    assert (found == levels).all()


def test_a_call_has_a_file_and_a_placeholder_for_each_picture_and_asks_for_the_prompt(rules, shown):
    text = GenerationRequest("t", np.array([8, 9], np.int32), Sampling(), 0)
    answers = [Answer(text, 5), Answer(shown, 5)]
    answers[1].pictures = Pictures(rules).of(shown)
    for answer in answers:
        answer.begin(answer.request.id, 7)
    sent = body(answers, 7, (), rules)
    first, second = sent["input_ids"]
    assert first == [8, 9]
    assert second.count(rules.token) == len(SIZES)
    rest = [token for token in shown.tokens.tolist() if token != rules.token]
    assert [token for token in second if token != rules.token] == rest
    assert [len(files) for files in sent["image_data"]] == [0, len(SIZES)]
    assert sent["return_prompt_token_ids"] is True
    assert "image_data" not in body(answers[:1], 7, (), rules)


def test_what_is_sent_is_what_a_real_server_took_and_its_prompt_is_the_trainers(folder, rules, model):
    sent = RECORDED["shown"]["body"]
    files = [[decoded(file) for file in of_one] for of_one in sent["image_data"]]
    processor = AutoImageProcessor.from_pretrained(folder)
    made = processor(images=files[1], return_tensors="np", do_resize=False)
    media = [{name: made[name] for name in ("pixel_values", "image_grid_thw")}]
    how = Sampling(temperature=0.8, max_new_tokens=6)
    prompts = [[14, 15, 16], [10, 11, 3, 5, 4, 12, 3, 5, 5, 4, 13]]
    answers = []
    for rid, prompt, items in zip(sent["rid"], prompts, ([], media), strict=True):
        request = GenerationRequest(rid[6:], np.array(prompt, np.int32), how, 2**63 + 5, items)
        model.check_request(request, 256)
        answers.append(Answer(request, 6))
        answers[-1].pictures = Pictures(rules).of(request)
        answers[-1].begin(rid, 7)
    ours = json.loads(json.dumps(body(answers, 7, (5, 6), rules)))
    again = [[decoded(file) for file in of_one] for of_one in ours.pop("image_data")]
    assert ours == {name: value for name, value in sent.items() if name != "image_data"}
    for mine, theirs in zip(again[1], files[1], strict=True):
        assert mine.info == theirs.info == {"weights": "7"}
        assert (np.asarray(mine) == np.asarray(theirs)).all()
    *said, end = RECORDED["shown"]["stream"]
    assert end == "data: [DONE]"
    for line in said:
        piece = msgspec.json.decode(line.removeprefix("data: "), type=Piece)
        assert piece.meta_info is not None
        assert piece.prompt_token_ids == prompts[piece.index]
        answers[piece.index].take(piece.meta_info)
    assert [len(answer.generation("length").tokens) for answer in answers] == [6, 6]


def test_a_file_is_another_one_for_each_version_and_shows_the_same(rules, shown):
    (file, *_) = Pictures(rules).of(shown)
    first, again, later = (at_version(file, version) for version in (1, 1, 12))
    assert first == again != later
    assert (np.asarray(decoded(first)) == np.asarray(decoded(later))).all()
    assert decoded(later).info == {"weights": "12"}


def test_what_requests_share_is_made_into_files_once_and_forgotten_with_it(rules, shown):
    pictures = Pictures(rules)
    media = [dict(item) | {"pixel_values": item["pixel_values"].copy()} for item in shown.media]
    one, other = changed(shown, media), changed(shown, [dict(item) for item in media])
    made = pictures.of(one)
    assert all(mine is theirs for mine, theirs in zip(made, pictures.of(other), strict=True))
    del media, one, other
    gc.collect()
    assert not len(pictures._files)


def test_several_pictures_in_one_item_are_several_files(rules, shown):
    whole = {
        "kind": "image",
        "pixel_values": np.concatenate([item["pixel_values"] for item in shown.media]),
        "image_grid_thw": np.concatenate([item["image_grid_thw"] for item in shown.media]),
    }
    request = changed(shown, [whole])
    rules.check(request)
    assert Pictures(rules).of(request) == Pictures(rules).of(shown)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pixel_values": np.zeros((16, 7), np.float32)}, r"float32 \[16, 7\]; .* means floats \[16, 1536\]"),
        ({"pixel_values": np.zeros((16, 1536), np.int8)}, "pixel_values is int8"),
        ({"image_grid_thw": np.array([[1, 3, 4]])}, "height and width multiples of 2"),
        ({"image_grid_thw": np.array([[2, 4, 4]])}, r"means floats \[32, 1536\]"),
        ({"image_grid_thw": np.array([4.0, 4.0])}, r"is float64 \[4.0, 4.0\]; expected integers"),
        ({"kind": "video"}, "item 0 of request 'r' has kind 'video'"),
        ({"image_grid_thw": np.array([[1, 2, 2]]), "pixel_values": np.zeros((4, 1536), np.float32)}, "stand"),
    ],
)
def test_tensors_that_are_no_picture_are_refused_before_anything_is_asked(change, message, model, shown):
    with pytest.raises(InvalidRequest, match=message):
        model.check_request(changed(shown, [shown.media[0] | change, *shown.media[1:]]), 4096)


def test_placeholders_must_stand_where_a_server_will_put_them(rules, shown):
    (item, *_) = shown.media
    rules.check(changed(shown, [item], [3, *[rules.token] * 4, 4]))
    for tokens in ([*[rules.token] * 4, 4], [3, *[rules.token] * 2, 4, *[rules.token] * 2, 9]):
        with pytest.raises(InvalidRequest, match="in runs of"):
            rules.check(changed(shown, [item], tokens))


@pytest.mark.parametrize("shift", [0.5 / 127.5, 3.0, np.nan])
def test_values_between_levels_are_refused(shift, rules, shown):
    (item, *rest) = shown.media
    off = item | {"pixel_values": item["pixel_values"] + np.float32(shift)}
    with pytest.raises(
        InvalidRequest, match="item 0 of request 'r': its pixel_values are no picture of 8 bits"
    ):
        Pictures(rules).of(changed(shown, [off, *rest]))


def test_frames_that_differ_are_no_still_picture(rules, shown):
    (item, *rest) = shown.media
    pixels = item["pixel_values"].copy()
    pixels[0, 256] = 0.0 if pixels[0, 256] else 1.0
    with pytest.raises(InvalidRequest, match="no picture of 8 bits"):
        Pictures(rules).of(changed(shown, [item | {"pixel_values": pixels}, *rest]))


def test_a_model_that_sees_needs_to_say_how(folder, tmp_path):
    config = json.loads((folder / "config.json").read_text())
    assert PictureRules.read(folder, config | {"model_type": "qwen3"}) is None
    with pytest.raises(EngineError, match=r"no preprocessor_config.json, and its model sees pictures"):
        PictureRules.read(tmp_path, config)
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": {"patch_size": 14}}))
    found = PictureRules.read(tmp_path, config)
    assert found is not None
    assert (found.patch, found.merge) == (14, 2)
