#!/usr/bin/env bash
# GRPO of Qwen3-30B-A3B, a mixture of experts, on the sixteen GPUs of two nodes. See --help.
set -euo pipefail
# shellcheck source=scripts/training/launch.sh
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/../launch.sh"

about=$(
  cat <<'EOF'
Trains Qwen3-30B-A3B with GRPO and replayed routes (R3): Megatron on the eight GPUs of one node, four SGLang
servers of two GPUs on the other. A GPU of the trainer holds about 73 GiB, so GPUs of 80 GB are too small.
The data's columns are `prompt` (chat messages) and `label` (data.messages_column, data.answer_column).
EOF
)
launch "$about" "models/Qwen3-30B-A3B" "data/dapo-math-17k/dapo-math-17k.jsonl" \
  qwen3-30B-A3B-16xgpu.yaml spmd-multinode 2x8-141gb.yaml "$@"
