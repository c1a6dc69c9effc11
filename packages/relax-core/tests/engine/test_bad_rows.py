"""Rows that make no prompt: each is one named error, and the source goes on behind it."""

import io
import pickle
from pathlib import Path
from typing import Any

import datasets
import pytest
from omni_processor import MediaError, OmniProcessor
from relax.backends.tiny import write_tiny
from relax.config import ConfigError
from relax.config.inputs import DataSettings
from relax.engine.prompts import BadRow, PromptSource, read_rows

GOOD = {"prompt": "p", "answer": 1, "m": [{"role": "user", "content": "x"}], "image": ["A.png"]}


@pytest.mark.parametrize(
    ("row", "settings", "reason"),
    [
        ({"answer": 1}, {}, "no column 'prompt', only 'answer'"),
        ({"prompt": None}, {}, "'prompt' holds nothing"),
        ({"prompt": "x"}, {"answer_column": "answer"}, "no column 'answer'"),
        ({"prompt": "a\ud800b"}, {}, "surrogates not allowed"),
        ("a text", {}, "expected a mapping from columns to values, not 'a text'"),
        (None, {}, "expected a mapping"),
        ({"m": None}, {"messages_column": "m"}, "'m' holds None; expected a list of messages"),
        ({"m": []}, {"messages_column": "m"}, "expected a list of messages"),
        ({"m": {"role": "user"}}, {"messages_column": "m"}, "expected a list of messages"),
        ({"m": ["hi"]}, {"messages_column": "m"}, "message 0 of column 'm' is 'hi'"),
        ({"m": [{"content": "hi"}]}, {"messages_column": "m"}, "message 0"),
        ({"m": [{"role": "user"}]}, {"messages_column": "m"}, "message 0"),
        ({"m": [{"role": "user", "content": 3}]}, {"messages_column": "m"}, "message 0"),
        (
            {"m": [{"role": "user", "content": [{"type": "text", "text": "\udfff"}]}]},
            {"messages_column": "m"},
            "surrogates not allowed",
        ),
        (
            {"prompt": "<image><image>", "image": "A.png"},
            {"image_column": "image"},
            "more <image> placeholders",
        ),
    ],
)
def test_a_row_that_makes_no_prompt_is_named(row: Any, settings: dict[str, Any], reason: str) -> None:
    rows = [GOOD, row, GOOD]
    source = PromptSource(rows, DataSettings(path="my.jsonl", shuffle=False, **settings), seed=0)
    assert source.take().ordinal == 0
    with pytest.raises(BadRow) as caught:
        source.take()
    assert (caught.value.path, caught.value.row, caught.value.ordinal) == ("my.jsonl", 1, 1)
    assert reason in caught.value.reason
    str(caught.value).encode()  # it can be written, whatever the row holds
    assert "data.path = 'my.jsonl': row 1 (ordinal 1) is no prompt" in str(caught.value)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)  # noqa: S301
    assert source.take().ordinal == 2


def test_the_ordinal_counts_over_epochs_and_the_row_does_not() -> None:
    source = PromptSource([GOOD, {"q": 1}], DataSettings(path="x", shuffle=False), seed=0)
    source.load_state({"next": 5, "returned": []})
    with pytest.raises(BadRow, match=r"row 1 \(ordinal 5\)"):
        source.take()


def test_pictures_in_the_data_are_left_encoded_for_the_processor(tmp_path: Path) -> None:
    """Rows are taken where episodes are run, and what is broken there is named as of any other source."""
    from PIL import Image

    whole = io.BytesIO()
    Image.new("RGB", (64, 64), "red").save(whole, "PNG")
    cells = [
        {"bytes": data, "path": None} for data in (whole.getvalue(), whole.getvalue()[:90], b"no picture")
    ]
    table = datasets.Dataset.from_dict({"prompt": ["a", "b", "c"], "image": cells})
    table.cast_column("image", datasets.Image()).to_parquet(str(tmp_path / "a.parquet"))
    settings = DataSettings(path=str(tmp_path / "a.parquet"), image_column="image", shuffle=False)
    source = PromptSource(read_rows(settings), settings, seed=0)
    model = OmniProcessor.from_pretrained(write_tiny(tmp_path / "model", kind="qwen3_vl"))
    for fault in (None, "cut off", "not an image"):
        messages = source.take().messages
        assert messages[0]["content"][0]["image"].keys() == {"bytes", "path"}
        if fault is None:
            assert model(messages).token_counts["image"] > 0
        else:
            with pytest.raises(MediaError, match=fault):
                model(messages)


def test_a_picture_that_datasets_brings_to_a_mode_is_left_to_it(tmp_path: Path) -> None:
    from PIL import Image

    whole = io.BytesIO()
    Image.new("RGB", (64, 64), "red").save(whole, "PNG")
    cells = [{"bytes": data, "path": None} for data in (whole.getvalue(), b"no picture")]
    table = datasets.Dataset.from_dict({"prompt": ["a", "b"], "image": cells})
    table.cast_column("image", datasets.Image(mode="L")).to_parquet(str(tmp_path / "a.parquet"))
    settings = DataSettings(path=str(tmp_path / "a.parquet"), image_column="image", shuffle=False)
    source = PromptSource(read_rows(settings), settings, seed=0)
    assert source.take().messages[0]["content"][0]["image"].mode == "L"
    with pytest.raises(BadRow, match="row 1 "):
        source.take()


def test_an_empty_field_of_a_json_file_is_not_taken_for_the_word_none(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"prompt": "x"}\n{"question": "y"}\n')
    settings = DataSettings(path=str(file), shuffle=False)
    source = PromptSource(read_rows(settings), settings, seed=0)
    source.take()
    with pytest.raises(BadRow, match="'prompt' holds nothing"):
        source.take()


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        ("None", "returned None; expected a list of rows"),
        ("{'prompt': ['x']}", "expected a list of rows"),
        ("'text'", "expected a list of rows"),
        ("7", "returned 7; expected"),
        ("['a', 'b']", "rows must be mappings .*; row 0 is 'a'"),
        ("[]", "holds no rows"),
    ],
)
def test_a_function_that_gives_no_rows_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, returned: str, expected: str
) -> None:
    name = f"no_rows_{abs(hash(returned))}"
    (tmp_path / f"{name}.py").write_text(f"ROWS = 3\ndef make():\n    return {returned}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=expected) as caught:
        read_rows(DataSettings(path=f"{name}:make"))
    assert f"{name}:make" in str(caught.value)
    with pytest.raises(ConfigError, match="expected a function that returns rows"):
        read_rows(DataSettings(path=f"{name}:ROWS"))
