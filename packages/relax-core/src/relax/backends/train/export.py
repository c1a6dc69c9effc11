"""A trained model as a Hugging Face folder, with everything beside the weights that its source folder had."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel

from relax.backends.train.errors import ExportError
from relax.backends.train.whole_omni import put_back

_COMPANIONS = {".json", ".jinja", ".txt", ".model"}
"""Suffixes of tokenizer, chat template, processor and generation files."""


def export_model(
    model: PreTrainedModel, *, source: Path, target: Path, tensors: Mapping[str, Tensor] | None = None
) -> None:
    """Write config, safetensors and the companions of `source` to `target`, whole or not at all.

    Tied weights are written once. transformers loads the folder with the same logits, bit for bit.

    Args:
        model: what to write, in its own dtype.
        source: the folder the model came from.
        target: made by this call; may exist if empty.
        tensors: the weights by name, where they are not those of the model.

    Raises:
        ExportError: the target holds something, or is no folder.
    """
    with export_folder(source=source, target=target) as made:
        model.save_pretrained(made, state_dict=None if tensors is None else dict(tensors))


@contextlib.contextmanager
def export_folder(*, source: Path, target: Path) -> Iterator[Path]:
    """An empty folder to write config and weights into. With the companions of `source` that are not there
    then, it becomes `target` at the end of the block, or nothing does. A thinker of a whole Qwen3-Omni is put
    back into that.

    Raises:
        ExportError: the target holds something, or is no folder.
    """
    target = Path(target)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ExportError(f"export target {target} is already there and not an empty folder; name a new one")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as scratch:
        made = Path(scratch) / "model"
        made.mkdir()
        yield made
        for path in sorted(source.iterdir()):
            weights = path.name.endswith(".index.json")
            there = path.name == "config.json" or (made / path.name).exists()
            if path.is_file() and path.suffix in _COMPANIONS and not weights and not there:
                shutil.copyfile(path, made / path.name)
        put_back(made, source)
        os.replace(made, target)
