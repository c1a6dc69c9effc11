#!/usr/bin/env bash
# GRPO of Qwen3-4B on the eight GPUs of one node. See --help.
set -euo pipefail
# shellcheck source=scripts/training/launch.sh
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/../launch.sh"

about=$(
  cat <<'EOF'
Trains Qwen3-4B with GRPO on questions with checkable answers: Megatron on four GPUs, four SGLang servers on four.
The data's columns are `prompt` (chat messages) and `label` (data.messages_column, data.answer_column).
EOF
)
launch "$about" "models/Qwen3-4B" "data/dapo-math-17k/dapo-math-17k.jsonl" \
  qwen3-4B-8xgpu.yaml local 1x8-80gb.yaml "$@"
