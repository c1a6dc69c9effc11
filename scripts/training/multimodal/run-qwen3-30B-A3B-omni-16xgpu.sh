#!/usr/bin/env bash
# GRPO of the thinker of Qwen3-Omni-30B-A3B on videos and sounds, on the sixteen GPUs of two nodes. See --help.
set -euo pipefail
# shellcheck source=scripts/training/launch.sh
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/../launch.sh"

about=$(
  cat <<'EOF'
Trains the thinker of Qwen3-Omni-30B-A3B with GRPO on questions about videos and sounds: Megatron on the eight GPUs
of one node, four SGLang servers of two GPUs each on the other, routes replayed. The encoders stay as they are
(actor.freeze). For pictures add data.image_column=images; for text alone model.text_only=true and no columns of media.

First write the thinker as a model of its own:
  python scripts/tools/extract_thinker.py MODELS/Qwen3-Omni-30B-A3B-Instruct MODELS/Qwen3-Omni-30B-A3B-Instruct-thinker

The data's columns are `problem` (with <video> and <audio> where they go), `videos`, `audios` and `answer`
(data.prompt_column, data.video_column, data.audio_column, data.answer_column).
EOF
)
launch "$about" "models/Qwen3-Omni-30B-A3B-Instruct-thinker" "data/avqa/train.jsonl" \
  qwen3-30B-A3B-omni-16xgpu.yaml spmd-multinode 2x8-141gb.yaml "$@"
