#!/usr/bin/env bash
# GRPO of the thinker of Qwen3-Omni-30B-A3B on text, on the sixteen GPUs of two nodes. See --help.
set -euo pipefail
# shellcheck source=scripts/training/launch.sh
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/../launch.sh"

about=$(
  cat <<'EOF'
Trains the thinker of Qwen3-Omni-30B-A3B with GRPO on TEXT: torch_native with FSDP2 on the eight GPUs of one node,
an embedded transformers engine on each GPU of the other. The encoders stay as they are. For data that is seen or
heard add model.text_only=false and its columns: data.image_column=..., data.video_column=..., data.audio_column=...

First write the thinker as a model of its own:
  python scripts/tools/extract_thinker.py MODELS/Qwen3-Omni-30B-A3B-Instruct MODELS/Qwen3-Omni-30B-A3B-Instruct-thinker

The data's columns are `prompt` (chat messages) and `label` (data.messages_column, data.answer_column).
EOF
)
launch "$about" "models/Qwen3-Omni-30B-A3B-Instruct-thinker" "data/dapo-math-17k/dapo-math-17k.jsonl" \
  qwen3-30B-A3B-omni-16xgpu.yaml spmd-multinode 2x8-141gb.yaml "$@"
