#!/usr/bin/env python
"""Turn a Megatron `torch_dist` checkpoint into a Hugging Face folder.

    python scripts/tools/convert_torch_dist_to_hf_bridge.py \\
        --input-dir RUN/checkpoints/STEP --output-dir OUT --origin-hf-dir MODEL

One process, no GPU: tensors are read and written one file at a time.
"""

import argparse
import sys
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(description="Megatron torch_dist checkpoint to a Hugging Face folder")
    parser.add_argument("--input-dir", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--output-dir", type=Path, required=True, help="Hugging Face folder to write")
    parser.add_argument(
        "--origin-hf-dir", type=Path, required=True, help="folder the model came from: config and tokenizer"
    )
    arguments = parser.parse_args()
    # Torch takes seconds to import, which those who only ask for help should not wait for.
    from relax.backends.train.errors import TrainError
    from relax.backends.train.megatron.convert import convert

    try:
        files = convert(arguments.input_dir, arguments.output_dir, arguments.origin_hf_dir)
    except TrainError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"wrote {len(files)} file{'s' * (len(files) != 1)} of weights to {arguments.output_dir}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
