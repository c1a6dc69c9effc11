#!/usr/bin/env bash
# Checks on a machine with a GPU what CI's machines cannot: bash scripts/gpu_check.sh [dcs] [--rehearse]
#
# Takes the Python of $PYTHON, else .venv, else python3, with the torch that is installed there, and downloads
# nothing. Prints a JSON line a figure, and a summary. Ends with 0 when every check holds, 1 when one fails,
# 2 when there is no CUDA device. --rehearse runs what can be run on a CPU.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

part=dcs
options=()
for argument in "$@"; do
  case "$argument" in
    dcs) part=$argument ;;
    --*) options+=("$argument") ;;
    *) echo "usage: bash scripts/gpu_check.sh [dcs] [--rehearse]; no part is called $argument" >&2; exit 64 ;;
  esac
done

python=${PYTHON:-}
for candidate in .venv/bin/python python3; do
  [ -n "$python" ] || ! command -v "$candidate" >/dev/null || python=$candidate
done
export PYTHONPATH="$PWD/packages/dcs/src${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" "scripts/gpu/check_$part.py" "${options[@]}"
