#!/usr/bin/env bash
# Started alike on every node (srun, mpirun, a job array): they become one Ray cluster, the first one trains.
set -euo pipefail

usage() {
  cat <<'EOF'
usage: scripts/entrypoint/spmd-multinode.sh CONFIG.yaml [key=value ...]     on every node, at the same time

The node of rank 0 starts a Ray and trains; the others join it, serve, and end when it ends. Under Slurm nothing
has to be set: srun --ntasks-per-node=1 scripts/entrypoint/spmd-multinode.sh CONFIG.yaml

  NODE_RANK         0 to NNODES-1 (default: SLURM_NODEID, else 0)
  NNODES            how many nodes (default: SLURM_NNODES, else 1)
  MASTER_ADDR       where the nodes reach rank 0 (default under Slurm: the first of its nodes)
  MASTER_PORT       port of its Ray (default 6379)
  JOIN_SECONDS      longest wait of a node for rank 0 (default 600)
  RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH   the secret of this cluster, the same on every node (default:
                    ~/.ray/auth_token, made by rank 0; for nodes that share the home folder)
  RELAX_DOCTOR=1    start nothing: say what would run where and what is wrong (also: --dry-run)
  CLUSTER=FILE      with RELAX_DOCTOR: hold the configuration against the nodes that the file describes
  RELAX=COMMAND, RAY=COMMAND   the commands (the checkout's .venv, else those on PATH)

Ray's ports have to be open between the nodes and closed to others: its traffic is not encrypted.
EOF
}

# shellcheck source=scripts/entrypoint/words.sh
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/words.sh"
read_words "$@"
# shellcheck source=scripts/entrypoint/ending.sh
source "$root/scripts/entrypoint/ending.sh"

relax=$(command_of RELAX relax)

if [ "$dry" != 0 ]; then
  exec "$relax" doctor "${words[@]}" ray.address=auto ${CLUSTER:+--cluster "$CLUSTER"}
fi

ray=$(command_of RAY ray)
nodes=$(number_of NNODES "${NNODES:-${SLURM_NNODES:-1}}" 1)
rank=$(number_of NODE_RANK "${NODE_RANK:-${SLURM_NODEID:-0}}" 0 $((nodes - 1)))
port=$(number_of MASTER_PORT "${MASTER_PORT:-6379}" 1 65535)
join=$(number_of JOIN_SECONDS "${JOIN_SECONDS:-600}")
head=${MASTER_ADDR:-}
if [ -z "$head" ] && [ -n "${SLURM_JOB_NODELIST:-}" ]; then
  head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
fi
if [ -z "$head" ]; then
  if [ "$nodes" -gt 1 ]; then
    echo "spmd-multinode.sh: NNODES is $nodes and MASTER_ADDR is not set: name where rank 0 is reached" >&2
    exit 64
  fi
  head=127.0.0.1
fi
# Names become addresses, which Ray and the run's own listeners bind.
head=$(getent ahostsv4 "$head" | awk 'NR == 1 { print $1 }')
if [ -z "$head" ]; then
  echo "spmd-multinode.sh: MASTER_ADDR = ${MASTER_ADDR:-the first node} has no address here" >&2
  exit 69
fi

# Ray runs what it is sent, so only who knows the token may send: RAY_AUTH_TOKEN, the file RAY_AUTH_TOKEN_PATH, or
# ~/.ray/auth_token, which rank 0 makes when there is none. A node that does not share it cannot join.
export RAY_AUTH_MODE=${RAY_AUTH_MODE:-token}
# When a run has ended there is nothing to wait for on its nodes, which Ray does for half a minute.
export RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=${RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S:-0}

listens() { timeout 5 bash -c "exec 3<>/dev/tcp/$head/$port" 2>/dev/null; }

await_head() { # [PID]: until the Ray of rank 0 listens, or that process, which is to make it listen, has ended
  local deadline=$((SECONDS + join))
  until listens; do
    if [ -n "${1:-}" ] && ! kill -0 "$1" 2>/dev/null; then
      echo "spmd-multinode.sh: Ray did not start on $head:$port; it says why above" >&2
      exit 69
    fi
    if [ "$SECONDS" -ge "$deadline" ]; then
      echo "spmd-multinode.sh: rank 0 did not listen on $head:$port for $join s (JOIN_SECONDS)" >&2
      exit 69
    fi
    sleep 2
  done
}

leave_with_head() { # PID: ends it when rank 0 has not listened for 10 s; by itself Ray keeps the node for a minute
  local missed=0
  while [ "$missed" -lt 5 ] && kill -0 $$ 2>/dev/null; do
    sleep 2
    if listens; then missed=0; else missed=$((missed + 1)); fi
  done
  kill -TERM "$1" 2>/dev/null || true
}

# What this node is and has: rank 0 holds the others' against its own.
labels=$("$relax" node "$rank" "${words[@]}")

if [ "$rank" -ne 0 ]; then
  await_head
  ${tied[@]+"${tied[@]}"} "$ray" start --address "$head:$port" --labels "$labels" --block &
  own=$!
  hand_on "$own"
  leave_with_head "$own" &
  watcher=$!
  trap 'kill "$watcher" 2>/dev/null || true' EXIT
  await_end "$own"
  if [ "$told" -gt 0 ]; then
    echo "spmd-multinode.sh: node $rank was told to end" >&2
    exit 143
  fi
  # Its Ray ends with a fault when that of rank 0 is gone, which is the ordinary end of a run.
  if listens; then
    echo "spmd-multinode.sh: node $rank left while rank 0 goes on (status $status)" >&2
    exit 1
  fi
  echo "spmd-multinode.sh: rank 0 has ended, and node $rank with it; what Ray said of that above is no fault"
  exit 0
fi

if listens; then
  echo "spmd-multinode.sh: something listens on $head:$port already; choose another MASTER_PORT, or is another" \
    "node's NODE_RANK 0 too?" >&2
  exit 69
fi
if [ "$RAY_AUTH_MODE" = token ] && [ -z "${RAY_AUTH_TOKEN:-}${RAY_AUTH_TOKEN_PATH:-}" ]; then
  "$ray" get-auth-token --generate >/dev/null
fi
# In the background, so that this Ray and no other of the machine is ended with the run.
${tied[@]+"${tied[@]}"} "$ray" start --head --node-ip-address "$head" --port "$port" --labels "$labels" \
  --include-dashboard false --disable-usage-stats --block &
own=$!
trap 'kill "$own" 2>/dev/null || true; wait "$own" || true' EXIT
await_head "$own"
# The run waits until the nodes have joined: for as long as ray.start_seconds says.
${tied[@]+"${tied[@]}"} "$relax" train "${words[@]}" "ray.address=$head:$port" "ray.host=$head" "ray.nodes=$nodes" &
run=$!
hand_on "$run"
await_end "$run"
exit "$status"
