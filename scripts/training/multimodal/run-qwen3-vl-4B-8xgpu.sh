#!/usr/bin/env bash
# GRPO of Qwen3-VL-4B with pictures on the eight GPUs of one node. See --help.
set -euo pipefail
# shellcheck source=scripts/training/launch.sh
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/../launch.sh"

about=$(
  cat <<'EOF'
Trains Qwen3-VL-4B with GRPO on questions about pictures: torch_native with FSDP2 on four GPUs, and an SGLang
server on each of the others.
The data's columns are `problem` (with <image> where a picture goes), `images` and `answer`
(data.prompt_column, data.image_column, data.answer_column).
EOF
)
launch "$about" "models/Qwen3-VL-4B-Instruct" "data/geo3k/train.jsonl" \
  qwen3-vl-4B-8xgpu.yaml local 1x8-80gb.yaml "$@"
