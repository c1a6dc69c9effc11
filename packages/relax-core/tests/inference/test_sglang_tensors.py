"""Media on their way to SGLang as tensors: what its side reads is what the request holds, bit by bit."""

import gc
import json
import os
import runpy
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from relax.backends.inference.base import EngineSpec
from relax.backends.inference.errors import InvalidRequest
from relax.backends.inference.reading import reader_of
from relax.backends.inference.sglang.answers import Answer
from relax.backends.inference.sglang.flags import command, environment
from relax.backends.inference.sglang.model import ServedModel
from relax.backends.inference.sglang.pictures import normalisation
from relax.backends.inference.sglang.requests import body
from relax.backends.inference.sglang.tensors import IN_SERVER, Tensors
from relax.backends.models import load_config
from relax.config.roles import RolloutSettings
from safetensors import safe_open
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

WIRE = runpy.run_path(str(IN_SERVER / "relax_media" / "wire.py"))
PIXELS = {"image": "pixel_values", "video": "pixel_values_videos"}


def tensors_of(folder: Path) -> Tensors:
    reader = reader_of(load_config(folder))
    assert reader is not None
    return Tensors(reader, *normalisation(folder))


def asked(world: Any) -> list[Any]:
    """A request for each shape, at a rate of frames that gives whole positions."""
    oracle, ask, shapes = world
    rate = {"fps": 2.0} if hasattr(oracle.model.config, "audio_config") else {}
    return [ask(f"r{n}", parts, seed=n, **rate) for n, parts in enumerate(shapes) if parts]


def test_a_server_reads_what_requests_hold_and_where_it_stands(world):
    tensors, marks = tensors_of(world[0].folder), world[0].placeholders
    for request in asked(world):
        tensors.check(request)
        head, first = (
            pieces := [WIRE["read"](one) for one in tensors.of(request).pieces(len(request.tokens) + 5, 3)]
        )[0]
        assert head["version"] == 3
        assert first["positions"].shape == (3, len(request.tokens) + 5)
        assert head["following"] == first["positions"][0, -1] + 1
        taken = np.zeros(len(request.tokens), int)
        rebuilt: dict[tuple[int, str], list[np.ndarray]] = {}
        for part in head["parts"]:
            arrays = pieces[1 + part["item"]][1]
            for start, end in part["spans"]:
                taken[start:end] += 1
            kind = part["kind"]
            if kind == "audio":
                found = arrays["input_features"][part["start"], :, : part["end"]]
            else:
                found = arrays["pixels"][part["start"] : part["end"]]
                assert len(found) == np.prod(part["grid"]) == 4 * sum(b - a for a, b in part["spans"])
            rebuilt.setdefault((part["item"], kind), []).append(found)
        assert (taken == np.isin(request.tokens, marks)).all()
        for index, item in enumerate(request.media):
            for kind, name in PIXELS.items():
                if name in item:
                    whole = np.concatenate(rebuilt[index, kind])
                    assert whole.tobytes() == item[name].tobytes()
            if "input_features" in item:
                (heard,) = rebuilt[index, "audio"]
                assert heard.tobytes() == item["input_features"][0].tobytes()


def test_pixels_of_8_bits_travel_as_such_and_others_whole(vision_oracle, watch):
    tensors, request = tensors_of(vision_oracle.folder), watch("r", ("video", "image"), seed=3)
    film = request.media[0]
    packed = tensors.of(request).items[0]
    assert len(packed) < 0.4 * film["pixel_values_videos"].nbytes
    grain = np.random.default_rng(0).normal(0, 0.001, film["pixel_values_videos"].shape).astype(np.float32)
    noisy = film | {"pixel_values_videos": film["pixel_values_videos"] + grain}
    odd = tensors.of(msgspec.structs.replace(request, media=[noisy, request.media[1]])).items[0]
    assert len(odd) > 1.3 * film["pixel_values_videos"].nbytes
    assert WIRE["read"](odd)[1]["pixels"].tobytes() == noisy["pixel_values_videos"].tobytes()
    assert WIRE["read"](odd)[0]["digest"] != WIRE["read"](packed)[0]["digest"]


def test_what_requests_share_is_packed_once_and_forgotten_with_it(vision_oracle, watch):
    tensors, request = tensors_of(vision_oracle.folder), watch("r", ("video", "image"), seed=3)
    media = [
        {name: value.copy() if isinstance(value, np.ndarray) else value for name, value in item.items()}
        for item in request.media
    ]
    one = tensors.of(msgspec.structs.replace(request, media=media))
    other = tensors.of(msgspec.structs.replace(request, media=[dict(item) for item in media]))
    assert all(mine is theirs for mine, theirs in zip(one.items, other.items, strict=True))
    del media, one, other
    gc.collect()
    assert not len(tensors._packed)


def test_a_masked_sound_is_sent_from_its_beginning(omni_oracle, attend):
    tensors, request = tensors_of(omni_oracle.folder), attend("r", ("audio",), seed=1)
    (item,) = request.media
    mel, mask = item["input_features"], item["feature_attention_mask"]
    shifted = item | {
        "input_features": np.concatenate([mel[..., :2] * 0, mel, mel[..., :3] * 0], axis=-1),
        "feature_attention_mask": np.pad(mask, ((0, 0), (2, 3))),
    }
    packed = tensors.of(msgspec.structs.replace(request, media=[shifted])).items[0]
    heard = WIRE["read"](packed)[1]["input_features"]
    assert heard[0, :, : mel.shape[2]].tobytes() == mel[0].tobytes()


def test_video_between_whole_positions_is_refused_by_name(omni_oracle, attend):
    tensors = tensors_of(omni_oracle.folder)
    tensors.check(attend("even", ("video",), fps=2.0))
    with pytest.raises(InvalidRequest, match="'odd' shows a video whose steps do not begin at whole"):
        tensors.check(attend("odd", ("video",), fps=4.0))


def test_placeholders_of_video_that_nothing_stands_for_are_refused(vision_oracle, watch, tmp_path):
    model = ServedModel.read(vision_oracle.folder, "float32", tmp_path / "completed", 0)
    for parts in (("video",), ("image", "video")):
        request = watch("r", parts, seed=1)
        model.check_request(request, 256)
        with pytest.raises(InvalidRequest, match=r"'r' has \d+ video placeholder tokens"):
            model.check_request(msgspec.structs.replace(request, media=request.media[:-1]), 256)
    model.check_request(watch("text", ()), 256)


def test_requests_with_and_without_tensors_go_in_one_call(vision_oracle, watch):
    tensors = tensors_of(vision_oracle.folder)
    requests = [watch("text", ()), watch("film", ("video",), seed=1)]
    answers = [Answer(request, 6) for request in requests]
    answers[1].shown = tensors.of(requests[1])
    answers[1].tokens.extend([9, 9])
    sent = json.loads(json.dumps(body(answers, 7, (5, 6))))
    assert sent["input_ids"] == [requests[0].tokens.tolist(), [*requests[1].tokens.tolist(), 9, 9]]
    assert sent["return_prompt_token_ids"] is True
    assert "image_data" not in sent
    nothing, pieces = sent["video_data"]
    assert (nothing, len(pieces)) == ([], 2)
    assert WIRE["read"](pieces[0])[1]["positions"].shape == (3, len(requests[1].tokens) + 2)


def test_a_thinker_is_served_in_a_folder_of_the_whole_model_that_only_names_its_weights(
    omni_oracle, tmp_path
):
    model = ServedModel.read(omni_oracle.folder, "float32", tmp_path / "completed", 0)
    assert model.weights.keys() == omni_oracle.weights(0).keys()
    assert model.shows
    assert model.pictures is None
    with safe_open(model.folder / "model.safetensors", "pt") as names:
        named = {name: names.get_slice(name).get_shape() for name in names.keys()}  # noqa: SIM118
    sent = model.for_server(omni_oracle.weights(0))
    assert named == {name: list(tensor.shape) for name, tensor in sent.items()}
    assert all(name.startswith("thinker.") for name in named)
    file = (model.folder / "model.safetensors").stat()
    assert file.st_blocks * 512 < file.st_size / 4
    spec = EngineSpec("engine-0", omni_oracle.folder)
    words = command(spec, model.folder, 1, 64, hollow=model.hollow)
    assert words[words.index("--load-format") + 1] == "dummy"


def test_a_whole_omni_is_served_as_it_is_and_updated_in_its_thinker(omni_oracle, tmp_path):
    whole = tmp_path / "whole"
    omni_oracle.model.save_pretrained(tmp_path / "thinker")
    own = load_file(tmp_path / "thinker" / "model.safetensors")
    whole.mkdir()
    for file in omni_oracle.folder.iterdir():
        if file.name != "config.json" and file.suffix == ".json":
            (whole / file.name).write_bytes(file.read_bytes())
    thinker = json.loads((omni_oracle.folder / "config.json").read_text())
    (whole / "config.json").write_text(
        json.dumps({"model_type": "qwen3_omni_moe", "thinker_config": thinker})
    )
    spoken = {"talker.model.norm.weight": torch.ones(3)}
    save_file(
        {f"thinker.{name}": tensor for name, tensor in own.items()} | spoken, whole / "model.safetensors"
    )
    model = ServedModel.read(whole, "float32", tmp_path / "completed", 0)
    assert (model.folder, model.hollow, model.prefix) == (whole, False, "thinker.")
    assert model.weights.keys() == omni_oracle.weights(0).keys()
    assert model.shows


def test_a_server_finds_what_takes_tensors_beside_its_own_modules():
    settings = RolloutSettings.model_validate(
        {"engine": "sglang", "sglang": {"python": "/python", "env": {"PYTHONPATH": "/mine"}}}
    )
    spec = EngineSpec("engine-0", Path("m"), settings=settings)
    found = environment(spec, {"PYTHONPATH": "/theirs"}, shown=True)
    assert found["PYTHONPATH"] == f"{IN_SERVER}{os.pathsep}/mine"
    assert found["SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE"] == "relax_media"
    assert found["SGLANG_EXTERNAL_MODEL_PACKAGE"] == "relax_models"
    assert sorted(path.name for path in IN_SERVER.iterdir() if path.name != "__pycache__") == [
        "relax_media",
        "relax_models",
    ]
    assert "SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE" not in environment(spec, {})
