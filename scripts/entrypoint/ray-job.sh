#!/usr/bin/env bash
# Submits a configuration as a job to a Ray cluster that is there. See --help.
set -euo pipefail

usage() {
  cat <<'EOF'
usage: scripts/entrypoint/ray-job.sh CONFIG.yaml [key=value ...]

Submits a run as a Ray job and follows what it says; ends with 1 when the run fails. Ctrl-C ends the following
and not the job. Its driver runs on the head node, the roles wherever the cluster has room. The nodes need relax in
the environment that their Ray runs in (docker/Dockerfile makes one), the same paths for model, data and run
folder, and a network on which they reach each other.

  RAY_ADDRESS       of the dashboard, http://HEAD:8265 (default http://127.0.0.1:8265)
  JOB_ID            a name for the job (default: made of the time)
  JOB_ENV           names of environment variables to hand on, separated by spaces (such as "HF_HOME")
  WORKDIR           folder on the nodes that relative paths start from (default: this checkout's path)
  RELAX_DOCTOR=1    do not submit: say what would run where and what is wrong (also: --dry-run)
  CLUSTER=FILE      with RELAX_DOCTOR: hold the configuration against the nodes that the file describes
  RELAX=COMMAND     the relax command here, for RELAX_DOCTOR; RAY=COMMAND the ray command here
EOF
}

# shellcheck source=scripts/entrypoint/words.sh
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/words.sh"
read_words "$@"
# shellcheck source=scripts/entrypoint/ending.sh
source "$root/scripts/entrypoint/ending.sh"

if [ "$dry" != 0 ]; then
  relax=$(command_of RELAX relax)
  exec "$relax" doctor "${words[@]}" ray.address=auto ${CLUSTER:+--cluster "$CLUSTER"}
fi

ray=$(command_of RAY ray)
variables=()
for name in ${JOB_ENV:-}; do
  if [ -z "${!name+set}" ]; then
    echo "${0##*/}: JOB_ENV names $name, which is not set here; set it, or leave it out" >&2
    exit 64
  fi
  variables+=("$name")
done
# Ray stops a job by a signal to each of its processes, and kills them 3 s later. SIGINT is the one that the queue
# leaves to its run, which takes up to a minute and a half for a checkpoint and its end.
runtime=$(python3 -c '
import json, os, sys
stop = {"RAY_JOB_STOP_SIGNAL": "SIGINT", "RAY_JOB_STOP_WAIT_TIME_S": "120"}
print(json.dumps({"env_vars": stop | {name: os.environ[name] for name in sys.argv[1:]}}))
' ${variables[@]+"${variables[@]}"})

address=${RAY_ADDRESS:-http://127.0.0.1:8265}
if [[ ! $address =~ ^https?://[^/:]+(:[0-9]+)?/?$ ]]; then
  echo "${0##*/}: RAY_ADDRESS = $address is no address of a dashboard; it looks like http://HEAD:8265" >&2
  exit 64
fi
if ! why=$(python3 -c '
import socket, sys
from urllib.parse import urlsplit
where = urlsplit(sys.argv[1])
try:
    socket.create_connection((where.hostname, where.port or {"http": 80, "https": 443}[where.scheme]), 10).close()
except (OSError, ValueError, OverflowError) as error:
    sys.exit(print(getattr(error, "strerror", None) or error) or 1)
' "$address"); then
  echo "${0##*/}: no Ray answers at $address ($why); start one (ray start --head), or say in RAY_ADDRESS where the" \
    "dashboard of its head node is" >&2
  exit 69
fi

# The words are quoted for the shell that starts the driver.
printf -v quoted '%q ' "${words[@]}"
printf -v folder '%q' "${WORKDIR:-$root}"
job=${JOB_ID:-relax-$(date +%Y%m%d-%H%M%S)-$$}
${tied[@]+"${tied[@]}"} "$ray" job submit \
  --address "$address" \
  --submission-id "$job" \
  --runtime-env-json "$runtime" \
  -- bash -c "cd $folder && exec relax train ${quoted}ray.address=auto" &
own=$!
hand_on "$own"
await_end "$own"
if [ "$told" -gt 0 ]; then
  echo "${0##*/}: the job goes on; follow it: $ray job logs --address $address --follow $job; stop it: $ray job stop" \
    "--address $address $job" >&2
  exit 130
fi
exit "$status"
