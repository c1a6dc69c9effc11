#!/usr/bin/env bash
# Checks on a machine with a GPU what CI's machines cannot: bash scripts/gpu_check.sh [dcs|train] [OPTIONS]
#
#   dcs     nccl, staging, pause, publish, CUDA-IPC; less than three minutes
#   train   torch_native, the embedded engine and megatron-core on a small Qwen3; less than six minutes
#
# Without a name all parts run, one after the other. Takes the Python of $PYTHON, else .venv, else python3, with
# the torch that is installed there, and downloads nothing.
#
#   --wheels=FOLDER   wheels that this Python lacks, for this run alone ($WHEELS); scripts/gpu/carry.sh gets them
#   --rehearse        what can be run on a CPU, small
#
# Prints a JSON line a figure, and a summary. Ends with 0 when every check holds, 1 when one fails, 2 when there
# is no CUDA device, 64 when it is called wrongly.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

parts=()
options=()
wheels=${WHEELS:-}
path=$PWD/packages/relax-core/src:$PWD/packages/agentic/src:$PWD/packages/dcs/src:$PWD/packages/transferqueue/src
path=$path:$PWD/packages/omni-processor/src
for argument in "$@"; do
  case "$argument" in
    dcs | train) parts+=("$argument") ;;
    --wheels=*) wheels=${argument#--wheels=} ;;
    --rehearse)
      options+=("$argument")
      path=$path:$PWD/packages/relax-core/tests/train/megatron/shim # megatron-core wants CUDA
      ;;
    *)
      echo "usage: bash scripts/gpu_check.sh [dcs|train] [--rehearse] [--wheels=FOLDER]; nothing is called $argument" >&2
      exit 64
      ;;
  esac
done
[ ${#parts[@]} -gt 0 ] || parts=(dcs train)

python=${PYTHON:-}
for candidate in .venv/bin/python python3; do
  [ -n "$python" ] || ! command -v "$candidate" >/dev/null || python=$candidate
done

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
if [ -n "$wheels" ]; then
  shopt -s nullglob
  found=("$wheels"/*.whl)
  [ ${#found[@]} -gt 0 ] || { echo "there are no wheels in $wheels; bash scripts/gpu/carry.sh FOLDER gets them" >&2; exit 64; }
  "$python" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --target "$scratch/site" \
    "${found[@]}" >&2
  path=$path:$scratch/site
fi
export PYTHONPATH="$path${PYTHONPATH:+:$PYTHONPATH}"

worst=0
for part in "${parts[@]}"; do
  status=0
  "$python" "scripts/gpu/check_$part.py" "${options[@]}" || status=$?
  # No device is the same for all parts; any failure counts more than none.
  if [ "$status" -ne 0 ] && [ "$worst" -ne 1 ]; then worst=$status; fi
  if [ "$status" -eq 2 ]; then break; fi
done
exit "$worst"
