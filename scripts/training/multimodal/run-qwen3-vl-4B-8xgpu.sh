#!/usr/bin/env bash
# GRPO of Qwen3-VL-4B with pictures on the eight GPUs of one node. See --help.
set -euo pipefail

usage() {
  cat <<'EOF'
usage: scripts/training/multimodal/run-qwen3-vl-4B-8xgpu.sh [--dry-run] [key=value ...]

Trains Qwen3-VL-4B with GRPO on questions about pictures: torch_native with FSDP2 on four GPUs, and an embedded
transformers engine on each of the others. Neither Megatron nor SGLang is used: the megatron backend does not map
Qwen3-VL, and SGLang takes pictures as they were before processing, which a run does not carry.
The data's columns are `problem` (with <image> where a picture goes), `images` and `answer`
(data.prompt_column, data.image_column, data.answer_column).

  EXP_DIR           folder with models/ and data/; runs go to EXP_DIR/runs (default: the current folder)
  MODEL             the model's folder (default: EXP_DIR/models/Qwen3-VL-4B-Instruct)
  DATA              the prompts (default: EXP_DIR/data/geo3k/train.jsonl)
  RUNS              where run folders go (default: EXP_DIR/runs); all nodes have to see it
  CONFIG            the configuration (default: configs/qwen3-vl-4B-8xgpu.yaml)
  ENTRYPOINT        local, ray-job or spmd-multinode (default: local; see scripts/entrypoint/)
  CLUSTER           the nodes that --dry-run holds it against (default: configs/clusters/1x8-80gb.yaml)
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
model=${MODEL:-$exp/models/Qwen3-VL-4B-Instruct}
data=${DATA:-$exp/data/geo3k/train.jsonl}
entrypoint=$root/scripts/entrypoint/${ENTRYPOINT:-local}.sh
if [ ! -f "$entrypoint" ]; then
  echo "${0##*/}: ENTRYPOINT = $ENTRYPOINT is none of local, ray-job, spmd-multinode" >&2
  exit 64
fi
if [ "$RELAX_DOCTOR" != 0 ]; then
  export CLUSTER=${CLUSTER:-$root/configs/clusters/1x8-80gb.yaml}
fi
exec "$entrypoint" "${CONFIG:-$root/configs/qwen3-vl-4B-8xgpu.yaml}" \
  "model.path=$model" "data.path=$data" "run.root=${RUNS:-$exp/runs}" \
  ${words[@]+"${words[@]}"}
