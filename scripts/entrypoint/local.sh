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

# shellcheck source=scripts/entrypoint/words.sh
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/words.sh"
read_words "$@"

relax=$(command_of RELAX relax)

if [ "$dry" != 0 ]; then
  exec "$relax" doctor "${words[@]}" ray.address=null ${CLUSTER:+--cluster "$CLUSTER"}
fi
# A Ray inside the command: it ends with the run, however that ends.
exec "$relax" train "${words[@]}" ray.address=null
