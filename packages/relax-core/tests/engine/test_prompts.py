import json
import os
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
from relax.config import ConfigError
from relax.config.inputs import DataSettings
from relax.engine.prompts import PromptSource, messages_of, read_rows


def rows(count: int) -> list[dict[str, object]]:
    return [{"prompt": f"p{i}", "answer": i} for i in range(count)]


def source(count: int = 10, seed: int = 3) -> PromptSource:
    return PromptSource(rows(count), DataSettings(path="x", answer_column="answer"), seed)


def test_each_epoch_takes_every_row_once_in_an_order_of_its_own() -> None:
    prompts = source()
    epochs = [[prompts.take().key for _ in range(10)] for _ in range(3)]
    assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs)
    assert len(set(epochs[0])) == 10
    assert epochs[0] != epochs[1] != epochs[2]


def test_the_order_is_a_function_of_the_seed() -> None:
    first, again, other = source(seed=1), source(seed=1), source(seed=2)
    order = [first.take().key for _ in range(20)]
    assert order == [again.take().key for _ in range(20)]
    assert order != [other.take().key for _ in range(20)]


def test_a_resumed_source_skips_and_repeats_nothing() -> None:
    whole = source()
    expected = [whole.take().ordinal for _ in range(25)]
    interrupted = source()
    taken = [interrupted.take().ordinal for _ in range(13)]
    trained = [ordinal for ordinal in taken if ordinal not in (8, 11)]
    resumed = source()
    resumed.load_state(json.loads(json.dumps(interrupted.state(untrained=[11, 8]))))
    after = [resumed.take().ordinal for _ in range(14)]
    assert after[:2] == [8, 11]
    assert sorted(trained + after) == expected


def test_placeholders_and_leftover_images_become_parts() -> None:
    settings = DataSettings(path="x", image_column="image", system_prompt="be brief")
    inline = messages_of({"prompt": "a<image>b", "image": "A.png"}, settings)
    assert inline[1]["content"] == [
        {"type": "text", "text": "a"},
        {"type": "image", "image": "A.png"},
        {"type": "text", "text": "b"},
    ]
    before = messages_of({"prompt": "what?", "image": ["A.png", "B.png"]}, settings)
    assert [part["type"] for part in before[1]["content"]] == ["image", "image", "text"]
    with pytest.raises(ValueError, match="more <image> placeholders than images"):
        messages_of({"prompt": "<image><image>", "image": "A.png"}, settings)


def test_sounds_and_videos_take_their_places_beside_images() -> None:
    settings = DataSettings(
        path="x", image_column="i", audio_column="a", video_column="v", audio_in_video=True
    )
    film = {"type": "video", "video": "A.mp4", "use_audio_in_video": True}
    row = {"prompt": "<audio>a<video>b<image><audio>", "i": "A.png", "a": ["1.wav", "2.wav"], "v": "A.mp4"}
    (message,) = messages_of(row, settings)
    assert message["content"] == [
        {"type": "audio", "audio": "1.wav"},
        {"type": "text", "text": "a"},
        film,
        {"type": "text", "text": "b"},
        {"type": "image", "image": "A.png"},
        {"type": "audio", "audio": "2.wav"},
    ]
    left = {"prompt": "hear <audio>", "i": None, "a": ["1.wav", "2.wav"], "v": ["A.mp4"]}
    (message,) = messages_of(left, settings)
    assert message["content"] == [
        film,
        {"type": "audio", "audio": "2.wav"},
        {"type": "text", "text": "hear "},
        {"type": "audio", "audio": "1.wav"},
    ]
    (plain,) = messages_of({"prompt": "none", "i": None, "a": [], "v": None}, settings)
    assert plain == {"role": "user", "content": "none"}
    with pytest.raises(ValueError, match="more <video> placeholders than videos"):
        messages_of({"prompt": "<video>", "i": None, "a": [], "v": []}, settings)
    # A placeholder without a column is text.
    (said,) = messages_of({"prompt": "<audio>", "v": []}, DataSettings(path="x", video_column="v"))
    assert said["content"] == "<audio>"


@pytest.mark.parametrize("listed", [False, True])
def test_sounds_of_a_table_stay_encoded(monkeypatch: pytest.MonkeyPatch, listed: bool) -> None:
    cells = [{"bytes": b"RIFF", "path": None}, {"bytes": None, "path": "b.wav"}]
    column = [[cell] for cell in cells] if listed else cells
    made = datasets.Dataset(pyarrow.table({"prompt": ["a", "b"], "a": column}))
    decoding: Any = datasets.List(datasets.Audio()) if listed else datasets.Audio()
    table = made.cast_column("a", decoding)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: table)
    settings = DataSettings(path="a_table", audio_column="a", shuffle=False)
    rows = read_rows(settings)
    found = [messages_of(row, settings)[0]["content"][0]["audio"] for row in rows]
    assert found == cells


def test_jsonl_and_parquet_give_the_same_rows(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(5)))
    datasets.Dataset.from_list(rows(5)).to_parquet(str(tmp_path / "a.parquet"))
    settings = DataSettings(path=str(tmp_path / "a.jsonl"), answer_column="answer")
    read = list(read_rows(settings))
    assert read == rows(5)
    assert list(read_rows(settings.model_copy(update={"path": str(tmp_path / "a.parquet")}))) == read
    assert len(read_rows(settings.model_copy(update={"limit": 2}))) == 2


@pytest.mark.parametrize(
    ("content", "settings", "expected"),
    [
        (None, {}, "there is no such file"),
        ("", {}, "is empty"),
        ('{"question": 1}\n', {}, "no such column, only 'question'"),
        ('{"prompt": 1}\n', {"answer_column": "promt"}, "did you mean 'prompt'"),
        ("{not json}\n", {}, "cannot be read as json"),
    ],
)
def test_bad_data_is_refused_by_name(
    tmp_path: Path, content: str | None, settings: dict, expected: str
) -> None:
    file = tmp_path / "data.jsonl"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=expected):
        read_rows(DataSettings(path=str(file), **settings))


def test_a_near_file_name_is_suggested(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"prompt": "x"}\n')
    with pytest.raises(ConfigError, match=r"did you mean .*train\.jsonl"):
        read_rows(DataSettings(path=str(tmp_path / "trian.jsonl")))


def test_rows_may_come_from_a_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rows.py").write_text("def make():\n    return [{'prompt': 'x'}]\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert list(read_rows(DataSettings(path="my_rows:make"))) == [{"prompt": "x"}]
    with pytest.raises(ConfigError, match="my_rows"):
        read_rows(DataSettings(path="my_rows:missing"))


def test_relative_paths_of_media_are_of_the_data_files_folder(tmp_path, monkeypatch):
    """Wherever the run is started from."""
    row = {
        "messages": [
            {"role": "user", "content": [{"type": "audio", "audio": "a.wav"}, {"type": "text", "text": "?"}]}
        ],
        "images": ["media/1.png", "/there/2.png", "data:image/png;base64,AAAA", "file:///3.png", b"PNG"],
        "video": {"path": "v.mp4", "bytes": None},
    }
    data = tmp_path / "rows.jsonl"
    data.write_text("")
    monkeypatch.chdir(tmp_path.parent)
    for path in (str(data), os.path.relpath(data)):
        settings = DataSettings(
            path=path, messages_column="messages", image_column="images", video_column="video"
        )
        (message,) = messages_of(row, settings)
        assert [part[part["type"]] for part in message["content"]] == [
            str(tmp_path / "media/1.png"),
            *row["images"][1:],
            {"path": str(tmp_path / "v.mp4"), "bytes": None},
            str(tmp_path / "a.wav"),
            "?",
        ]
