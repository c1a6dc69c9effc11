#!/usr/bin/env bash
# GRPO of Qwen3-30B-A3B, a mixture of experts, on the sixteen GPUs of two nodes. See --help.
set -euo pipefail

usage() {
  cat <<'EOF'
usage: scripts/training/text/run-qwen3-30B-A3B-16xgpu.sh [--dry-run] [key=value ...]

Trains Qwen3-30B-A3B with GRPO and replayed routes (R3): Megatron on the eight GPUs of one node, four SGLang
servers of two GPUs on the other. A GPU of the trainer holds about 73 GiB, so GPUs of 80 GB are too small.
The data's columns are `prompt` (chat messages) and `label` (data.messages_column, data.answer_column).

  EXP_DIR           folder with models/ and data/; runs go to EXP_DIR/runs (default: the current folder)
  MODEL             the model's folder (default: EXP_DIR/models/Qwen3-30B-A3B)
  DATA              the prompts (default: EXP_DIR/data/dapo-math-17k/dapo-math-17k.jsonl)
  RUNS              where run folders go (default: EXP_DIR/runs); all nodes have to see it
  CONFIG            the configuration (default: configs/qwen3-30B-A3B-16xgpu.yaml)
  ENTRYPOINT        local, ray-job or spmd-multinode (default: spmd-multinode; see scripts/entrypoint/)
  CLUSTER           the nodes that --dry-run holds it against (default: configs/clusters/2x8-141gb.yaml)
  --dry-run         or RELAX_DOCTOR=1: start nothing, say what would run where and what is wrong

key=value words change the configuration: actor.lr=2e-6 rollout.replicas=2
EOF
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
export RELAX_DOCTOR=${RELAX_DOCTOR:-0}
words=()
for word in "$@"; do
  case $word in
    -h | --help) usage; exit 0 ;;
    --dry-run) RELAX_DOCTOR=1 ;;
    *=*) words+=("$word") ;;
    *) echo "${0##*/}: $word is neither an option nor key=value; see --help" >&2; exit 64 ;;
  esac
done

exp=${EXP_DIR:-$PWD}
model=${MODEL:-$exp/models/Qwen3-30B-A3B}
data=${DATA:-$exp/data/dapo-math-17k/dapo-math-17k.jsonl}
entrypoint=$root/scripts/entrypoint/${ENTRYPOINT:-spmd-multinode}.sh
if [ ! -f "$entrypoint" ]; then
  echo "${0##*/}: ENTRYPOINT = $ENTRYPOINT is none of local, ray-job, spmd-multinode" >&2
  exit 64
fi
if [ "$RELAX_DOCTOR" != 0 ]; then
  export CLUSTER=${CLUSTER:-$root/configs/clusters/2x8-141gb.yaml}
fi
exec "$entrypoint" "${CONFIG:-$root/configs/qwen3-30B-A3B-16xgpu.yaml}" \
  "model.path=$model" "data.path=$data" "run.root=${RUNS:-$exp/runs}" \
  ${words[@]+"${words[@]}"}
