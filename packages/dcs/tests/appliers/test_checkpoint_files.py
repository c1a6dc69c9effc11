"""Model folders: read as the public safetensors library writes them, and written as it reads them."""

import json
import struct
from pathlib import Path

import dcs
import pytest
import torch
from dcs.appliers.checkpoint import layout_of_folder, read, write
from dcs.appliers.names import Prefixed, SameNames
from dcs.appliers.served import published_layout

SAME = SameNames()


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "a.bf16": torch.rand(3, 5, generator=generator).bfloat16(),
        "a.f8": torch.rand(7, generator=generator).to(torch.float8_e4m3fn),
        "b.f32": torch.rand(4, 4, generator=generator)[:, ::2],
        "b.i64": torch.arange(5),
        "c.bool": torch.tensor([True, False, True]),
        "c.empty": torch.zeros(0, 3),
        "d.scalar": torch.tensor(2.5, dtype=torch.float64),
    }


def test_what_is_written_is_read_back_bit_for_bit(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", tensors())
    back = dict(read(tmp_path / "model.safetensors"))
    assert back.keys() == tensors().keys()
    for name, tensor in tensors().items():
        assert back[name].dtype == tensor.dtype
        assert back[name].shape == tensor.shape
        bits = tensor.contiguous().flatten().view(torch.uint8)
        assert torch.equal(back[name].flatten().view(torch.uint8), bits)
    assert layout_of_folder(tmp_path) == dcs.layout.of(tensors())
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]


def test_the_public_library_agrees(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.torch")
    write(tmp_path / "ours.safetensors", tensors())
    theirs = library.load_file(tmp_path / "ours.safetensors")
    assert all(torch.equal(theirs[name].double(), tensor.double()) for name, tensor in tensors().items())
    dense = {name: tensor.contiguous() for name, tensor in tensors().items()}
    library.save_file(dense, tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    back = dict(read(tmp_path / "theirs.safetensors"))
    assert all(torch.equal(back[name].double(), tensor.double()) for name, tensor in tensors().items())


def test_several_files_are_one_layout(tmp_path: Path) -> None:
    write(tmp_path / "model-1.safetensors", {"b": torch.zeros(2)})
    write(tmp_path / "model-2.safetensors", {"a": torch.zeros(3)})
    assert layout_of_folder(tmp_path) == dcs.layout.of({"a": torch.zeros(3), "b": torch.zeros(2)})


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x01",
        struct.pack("<Q", 1 << 40) + b"{}",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 4) + b"{\xff}}",
        struct.pack("<Q", 12) + b'{"a": "text"}',
        b"%b%b"
        % (struct.pack("<Q", 41), json.dumps({"a": {"dtype": "F3", "shape": [1]}}).encode().ljust(41)),
        b"%b%b"
        % (struct.pack("<Q", 43), json.dumps({"a": {"dtype": "F32", "shape": [-1]}}).encode().ljust(43)),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(dcs.LayoutMismatch, match=r"model\.safetensors"):
        layout_of_folder(tmp_path)


def test_a_file_that_ends_early_is_refused_when_it_is_read(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    write(file, {"a": torch.zeros(8)})
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(dcs.LayoutMismatch, match="ends within tensor 'a'"):
        dict(read(file))


def test_an_engine_takes_what_its_model_folder_holds(folder: Path, weights) -> None:
    layout = published_layout("http://e", folder, None, None, SAME, required=False)
    assert layout == dcs.layout.of(weights(0))
    cast = published_layout("http://e", folder, None, torch.float16, SAME, required=False)
    assert {spec.dtype for spec in cast.tensors} == {"float16", "uint8"}
    renamed = published_layout("http://e", folder, None, None, Prefixed("actor.", "model."), required=False)
    assert all(spec.name.startswith("actor.") for spec in renamed.tensors)


def test_a_layout_that_is_given_has_to_fit_the_folder(folder: Path, weights) -> None:
    def against_the_folder(tensors: dict[str, torch.Tensor]) -> dcs.Layout:
        layout = dcs.layout.of(tensors)
        return published_layout("http://e", folder, layout, None, SAME, required=False)

    held = weights(0)
    assert against_the_folder({name: tensor for name, tensor in held.items() if "layers.0" in name})
    assert against_the_folder({name: t.half() if t.is_floating_point() else t for name, t in held.items()})
    assert against_the_folder(
        held | {"lm_head.weight": torch.zeros(16, 8)}
    )  # the config says that it is tied
    with pytest.raises(dcs.LayoutMismatch, match=r"'model.norm.weight' is published as bfloat16\[9\]"):
        against_the_folder(held | {"model.norm.weight": torch.zeros(9).bfloat16()})
    with pytest.raises(dcs.LayoutMismatch, match=r"'model.bias' is absent"):
        against_the_folder({"model.bias": torch.zeros(9)})
    with pytest.raises(dcs.LayoutMismatch, match=r"int64\[8\].*nothing was touched"):
        against_the_folder({"model.norm.weight": torch.zeros(8, dtype=torch.int64)})


def test_without_a_folder_the_layout_has_to_be_given() -> None:
    given = dcs.layout.of({"a": torch.zeros(1)})
    assert published_layout("http://e", "org/model", given, None, SAME, required=False) == given
    with pytest.raises(dcs.LayoutMismatch, match="give model= "):
        published_layout("http://e", "org/model", None, None, SAME, required=False)
    with pytest.raises(dcs.LayoutMismatch, match=r"no \*\.safetensors"):
        published_layout("http://e", "/nowhere", given, None, SAME, required=True)
