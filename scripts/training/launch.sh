# shellcheck shell=bash
# What the launch scripts have in common; sourced by them, with the words that they were given:
#   launch ABOUT MODEL DATA CONFIG ENTRYPOINT CLUSTER [word ...]
# MODEL and DATA are relative to EXP_DIR, CONFIG and CLUSTER to configs/ and configs/clusters/.

launch() {
  local about=$1 model=$2 data=$3 config=$4 entry=$5 cluster=$6 root exp word entrypoint
  local words=()
  shift 6
  root=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/../.." && pwd)
  export RELAX_DOCTOR=${RELAX_DOCTOR:-0}
  for word in "$@"; do
    case $word in
      -h | --help)
        cat <<EOF
usage: scripts/training/${0##*scripts/training/} [--dry-run] [key=value ...]

$about

  EXP_DIR           folder with models/ and data/; runs go to EXP_DIR/runs (default: the current folder)
  MODEL             the model's folder (default: EXP_DIR/$model)
  DATA              the prompts (default: EXP_DIR/$data)
  RUNS              where run folders go (default: EXP_DIR/runs); all nodes have to see it
  CONFIG            the configuration (default: configs/$config)
  ENTRYPOINT        local, ray-job or spmd-multinode (default: $entry; see scripts/entrypoint/)
  CLUSTER           the nodes that --dry-run holds it against (default: configs/clusters/$cluster)
  --dry-run         or RELAX_DOCTOR=1: start nothing, say what would run where and what is wrong

key=value words change the configuration: actor.lr=2e-6 rollout.replicas=2
EOF
        exit 0
        ;;
      --dry-run) RELAX_DOCTOR=1 ;;
      *=*) words+=("$word") ;;
      *)
        echo "${0##*/}: $word is neither an option nor key=value; see --help" >&2
        exit 64
        ;;
    esac
  done
  exp=${EXP_DIR:-$PWD}
  entrypoint=$root/scripts/entrypoint/${ENTRYPOINT:-$entry}.sh
  if [ ! -f "$entrypoint" ]; then
    echo "${0##*/}: ENTRYPOINT = $ENTRYPOINT is none of local, ray-job, spmd-multinode" >&2
    exit 64
  fi
  if [ "$RELAX_DOCTOR" != 0 ]; then
    export CLUSTER=${CLUSTER:-$root/configs/clusters/$cluster}
  fi
  exec "$entrypoint" "${CONFIG:-$root/configs/$config}" \
    "model.path=${MODEL:-$exp/$model}" "data.path=${DATA:-$exp/$data}" "run.root=${RUNS:-$exp/runs}" \
    ${words[@]+"${words[@]}"}
}
