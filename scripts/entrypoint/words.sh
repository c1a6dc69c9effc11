# shellcheck shell=bash disable=SC2034 # `dry` and `words` are for whoever sources this
# How the entry points read what they are given; sourced by them after they have said what `usage` prints.
# Sets `root`, the checkout; `dry`, 0 or 1; `words`, the configuration and what changes it.

read_words() {
  local word
  root=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/../.." && pwd)
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

command_of() { # VARIABLE NAME: the command that the variable names, else the checkout's, else the one on PATH
  local found=${!1:-}
  if [ -z "$found" ]; then
    if [ -x "$root/.venv/bin/$2" ]; then found=$root/.venv/bin/$2; else found=$2; fi
  fi
  if ! command -v "$found" >/dev/null; then
    echo "${0##*/}: there is no command $found; install it (make setup in the checkout), or name it: $1=COMMAND" >&2
    return 69
  fi
  echo "$found"
}

number_of() { # VARIABLE VALUE [LEAST [MOST]]
  local least=${3:-0} most=${4:-999999}
  if [[ ! $2 =~ ^[0-9]{1,6}$ ]] || ((10#$2 < least || 10#$2 > most)); then
    echo "${0##*/}: $1 = $2 is no number from $least to $most" >&2
    return 64
  fi
  echo "$((10#$2))"
}
