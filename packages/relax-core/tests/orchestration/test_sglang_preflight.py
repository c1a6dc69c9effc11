"""What a run with SGLang is refused for, when everything is known and nothing is started."""

import json
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from relax.backends.models import build_model
from relax.backends.tiny import write_tiny
from relax.config import ConfigError
from relax.orchestration.run_folder import RunFolder
from relax.orchestration.train import prepare


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    data = tmp_path / "prompts.jsonl"
    data.write_text(json.dumps({"prompt": "1+1=", "answer": "2"}) + "\n")
    servers = "rollout.sglang.urls=[http://127.0.0.1:1,http://127.0.0.1:2]"
    return [f"data={data}", "data.answer_column=answer", "rollout.engine=sglang", servers]


def test_servers_that_are_there_need_no_sglang_here(config, words, tmp_path):
    context = prepare(config(*words), RunFolder(tmp_path), resume=False)
    assert context.model == tmp_path / "model"


def test_a_python_without_sglang_is_found_before_anything_is_started(config, words, tmp_path):
    missing = ["rollout.sglang.urls=[]", f"rollout.sglang.python={tmp_path / 'no-python'}"]
    with pytest.raises(ConfigError, match="no-python' cannot be run"):
        prepare(config(*words, *missing), RunFolder(tmp_path), resume=False)


def test_a_replay_is_refused_as_its_bits_cannot_be_had_again(config, words, tmp_path):
    with pytest.raises(ConfigError, match=r"--replay with rollout.engine = sglang"):
        prepare(config(*words), RunFolder(tmp_path), resume=False, replay=tmp_path)


def test_a_model_that_sees_is_shown_pictures_unless_a_server_is_to_hold_them(config, words, tmp_path):
    assert prepare(config(*words, "model=tiny_vl"), RunFolder(tmp_path), resume=False).media
    held = "rollout.sglang.pause=retract"
    with pytest.raises(ConfigError, match=r"pause = retract with model.path = 'tiny_vl', which sees"):
        prepare(config(*words, "model=tiny_vl", held), RunFolder(tmp_path), resume=False)


def test_video_between_whole_positions_is_refused_with_the_row_that_shows_it(config, tmp_path):
    film = tmp_path / "film.mkv"
    with av.open(str(film), "w") as file:
        stream: Any = file.add_stream("ffv1", rate=4)
        stream.height, stream.width, stream.pix_fmt = 32, 64, "bgr0"
        for level in range(0, 160, 20):
            frame = av.VideoFrame.from_ndarray(np.full((32, 64, 3), level, np.uint8), format="rgb24")
            file.mux(stream.encode(frame))
        file.mux(stream.encode(None))
    data = tmp_path / "prompts.jsonl"
    data.write_text(json.dumps({"prompt": "<video>?", "answer": "2", "video": str(film)}) + "\n")
    model = write_tiny(tmp_path / "omni", "qwen3_omni", max_position_embeddings=512)
    build_model(model).save_pretrained(model)
    words = [
        *(f"model={model}", f"data.path={data}", "data.answer_column=answer", "data.video_column=video"),
        *("rollout.engine=sglang", "rollout.sglang.urls=[http://127.0.0.1:1,http://127.0.0.1:2]"),
    ]
    assert prepare(config(*words), RunFolder(tmp_path), resume=False).media
    rules = model / "video_preprocessor_config.json"
    rules.write_text(json.dumps(json.loads(rules.read_text()) | {"fps": 4}))
    with pytest.raises(ConfigError, match="row 0 shows a video whose steps in time do not begin at whole"):
        prepare(config(*words), RunFolder(tmp_path), resume=False)
    prepare(config(*words[:-2], "rollout.engine=transformers"), RunFolder(tmp_path), resume=False)
