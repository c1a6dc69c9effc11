# shellcheck shell=bash disable=SC2034 # `status` and `told` are for whoever sources this
# How the entry points end what they have started; sourced by them. What is to be ended runs in the background:
# bash would hear of no signal before a command in the foreground has ended.

# Put before a command in the background: it hears of a signal to all processes of a terminal or a Slurm step by
# `hand_on` alone, once, and it is ended when this script is killed, which runs no trap.
tied=()
if command -v setsid >/dev/null && command -v setpriv >/dev/null; then tied=(setsid setpriv --pdeathsig TERM); fi

told=0 # how often this script was told to end

hand_on() { # PID: what this script is told, it is told
  # shellcheck disable=SC2064 # of this process
  trap "told=\$((told + 1)); kill -TERM $1 2>/dev/null || true" INT TERM HUP
}

await_end() { # PID: sets `status`; a signal that is handed on interrupts a `wait`
  while true; do
    status=0
    wait "$1" || status=$?
    if [ "$status" -le 128 ] || ! kill -0 "$1" 2>/dev/null; then return; fi
  done
}
