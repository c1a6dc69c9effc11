#!/usr/bin/env bash
# Runs a configuration on this machine: starts a Ray here, trains, ends the Ray. See --help.
set -euo pipefail

usage() {
  cat <<'EOF'
usage: scripts/entrypoint/local.sh CONFIG.yaml [key=value ...]

Runs a configuration on this machine alone, with all of its GPUs.

  RELAX_DOCTOR=1    do not run: say what would run where and what is wrong (also: --dry-run)
  CLUSTER=FILE      with RELAX_DOCTOR: hold the configuration against the nodes that the file describes
  RELAX=COMMAND     the relax command (the checkout's .venv, else the one on PATH)
EOF
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
dry=${RELAX_DOCTOR:-0}
words=()
for word in "$@"; do
  case $word in
    -h | --help) usage; exit 0 ;;
    --dry-run) dry=1 ;;
    -*) echo "local.sh: there is no option $word; see --help" >&2; exit 64 ;;
    *) words+=("$word") ;;
  esac
done
if [ ${#words[@]} -eq 0 ]; then
  usage >&2
  exit 64
fi

relax=${RELAX:-}
[ -n "$relax" ] || { [ -x "$root/.venv/bin/relax" ] && relax=$root/.venv/bin/relax; } || relax=relax

if [ "$dry" != 0 ]; then
  exec "$relax" doctor "${words[@]}" ray.address=null ${CLUSTER:+--cluster "$CLUSTER"}
fi
# A Ray inside the command: it ends with the run, however that ends.
exec "$relax" train "${words[@]}" ray.address=null
