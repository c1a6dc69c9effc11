# shellcheck shell=bash disable=SC2034 # `dry` and `words` are for whoever sources this
# How the entry points read what they are given; sourced by them after they have said what `usage` prints.
# Sets `root`, the checkout; `dry`, 0 or 1; `words`, the configuration and what changes it.

read_words() {
  local word
  root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
  dry=${RELAX_DOCTOR:-0}
  words=()
  for word in "$@"; do
    case $word in
      -h | --help)
        usage
        exit 0
        ;;
      --dry-run) dry=1 ;;
      -*)
        echo "${0##*/}: there is no option $word; see --help" >&2
        exit 64
        ;;
      *) words+=("$word") ;;
    esac
  done
  if [ ${#words[@]} -eq 0 ]; then
    usage >&2
    exit 64
  fi
}

command_of() { # NAME: the checkout's, else the one on PATH
  if [ -x "$root/.venv/bin/$1" ]; then echo "$root/.venv/bin/$1"; else echo "$1"; fi
}
