"""A trained thinker put back into the whole Qwen3-Omni it was read from, which speaks as it did before."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from relax.backends.models import weights_prefix

_REST = ".whole"
_OF_THE_WHOLE = ("generation_config.json",)


def put_back(made: Path, source: Path) -> None:
    """Make of `made`, the folder of an exported thinker, one of the whole model: its tensors under the names
    they have in `source`, and beside them what `source` has of others, as it is there.

    Nothing happens where `source` is a thinker's own folder, or `made` is a whole model's already. One file
    of weights is held at a time.
    """
    prefix = weights_prefix(source)
    trained = sorted(made.glob("*.safetensors"))
    if not prefix or any(name.startswith(prefix) for file in trained for name in _names(file)):
        return
    others = [file for file in sorted(source.glob("*.safetensors")) if _others(file, prefix)]
    rest = made / _REST
    rest.mkdir()
    places: dict[str, str] = {}
    nbytes = 0
    for number, tensors in enumerate(_files(trained, others, prefix), 1):
        name = f"model-{number:05d}-of-{len(trained) + len(others):05d}.safetensors"
        save_file(tensors, rest / name, metadata={"format": "pt"})
        places |= dict.fromkeys(tensors, name)
        nbytes += sum(tensor.nbytes for tensor in tensors.values())
    for file in (*trained, made / "model.safetensors.index.json"):
        file.unlink(missing_ok=True)
    for file in rest.iterdir():
        file.rename(made / file.name)
    rest.rmdir()
    index = {"metadata": {"total_size": nbytes}, "weight_map": dict(sorted(places.items()))}
    (made / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    written = json.loads((made / "config.json").read_text())
    config = json.loads((source / "config.json").read_text()) | {"dtype": written.get("dtype")}
    (made / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for name in _OF_THE_WHOLE:
        (made / name).unlink(missing_ok=True)
        if (source / name).is_file():
            shutil.copyfile(source / name, made / name)


def _files(trained: list[Path], others: list[Path], prefix: str) -> Iterator[dict[str, Tensor]]:
    for file in trained:
        with safe_open(file, "pt", device="cpu") as held:
            yield {prefix + name: held.get_tensor(name) for name in held.keys()}  # noqa: SIM118 - no dictionary
    for file in others:
        with safe_open(file, "pt", device="cpu") as held:
            yield {name: held.get_tensor(name) for name in _others(file, prefix)}


def _names(file: Path) -> list[str]:
    with safe_open(file, "pt", device="cpu") as held:
        return list(held.keys())


def _others(file: Path, prefix: str) -> list[str]:
    return [name for name in _names(file) if not name.startswith(prefix)]
