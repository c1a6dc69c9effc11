"""Write the thinker of a Qwen3-Omni folder as a model folder of its own: what reads, sees and hears, without
what speaks.

    python scripts/tools/extract_thinker.py models/Qwen3-Omni-30B-A3B-Instruct OUT

One file of weights is held at a time. Tokenizer, processors and generation settings are copied.
"""

import argparse
import json
import shutil
import sys
from pathlib import Path

PREFIX = "thinker."
ARCHITECTURES = {"qwen3_omni_moe_thinker": "Qwen3OmniMoeThinkerForConditionalGeneration"}


class NotExtractable(ValueError):
    """The folder holds no thinker, or the target exists. The message says which."""


def extract(source: Path, target: Path) -> int:
    """Write the thinker of `source` to `target`; how many tensors it has.

    Raises:
        NotExtractable: see there.
    """
    # Torch takes seconds to import, which those who only ask for help should not wait for.
    from safetensors import safe_open
    from safetensors.torch import save_file

    config = json.loads((source / "config.json").read_text())
    thinker = config.get("thinker_config")
    architecture = ARCHITECTURES.get((thinker or {}).get("model_type", ""))
    if thinker is None or architecture is None:
        raise NotExtractable(
            f"{source} is a {config.get('model_type')!r} without a thinker of {', '.join(ARCHITECTURES)}; "
            f"give the folder of a Qwen3-Omni"
        )
    files = sorted(source.glob("*.safetensors"))
    if not files:
        raise NotExtractable(f"{source} has no *.safetensors weights")
    if target.exists():
        raise NotExtractable(f"{target} exists already; name a folder that does not")
    target.mkdir(parents=True)
    placed: dict[str, str] = {}
    nbytes = 0
    for number, file in enumerate(files, 1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        with safe_open(file, "pt", device="cpu") as tensors:
            own = {
                key.removeprefix(PREFIX): tensors.get_tensor(key)
                for key in tensors.keys()  # noqa: SIM118 - it is no dictionary
                if key.startswith(PREFIX)
            }
        if own:
            save_file(own, target / name, metadata={"format": "pt"})
            placed |= dict.fromkeys(own, name)
            nbytes += sum(tensor.nbytes for tensor in own.values())
    if not placed:
        raise NotExtractable(
            f"no tensor of {source} is called {PREFIX}...; its weights are of another layout"
        )
    index = {"metadata": {"total_size": nbytes}, "weight_map": dict(sorted(placed.items()))}
    (target / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    written = {"architectures": [architecture], **thinker}
    (target / "config.json").write_text(json.dumps(written, indent=2) + "\n")
    for file in sorted(source.iterdir()):
        weights = file.name.endswith((".safetensors", ".safetensors.index.json"))
        if file.is_file() and not weights and file.name != "config.json":
            shutil.copy(file, target / file.name)
    return len(placed)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the thinker of a Qwen3-Omni as a model of its own.")
    parser.add_argument("source", type=Path, help="folder of the whole model")
    parser.add_argument("target", type=Path, help="folder to write; must not exist")
    arguments = parser.parse_args()
    try:
        count = extract(arguments.source, arguments.target)
    except (NotExtractable, OSError) as error:
        sys.exit(str(error))
    print(f"{count} tensors written to {arguments.target}")


if __name__ == "__main__":
    main()
