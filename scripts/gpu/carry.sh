#!/usr/bin/env bash
# Gets the wheels that a machine with torch and transformers, but without an index to install from, lacks for
# the GPU check: bash scripts/gpu/carry.sh FOLDER [NAME...]
#
# In the versions that .venv has (the lock's), for x86-64 Linux and its Python. NAME...: others than those below.
# There: bash scripts/gpu_check.sh --wheels=FOLDER.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
[ $# -ge 1 ] || { echo "usage: bash scripts/gpu/carry.sh FOLDER [NAME...]" >&2; exit 64; }
folder=$1
shift
names=("$@")
[ ${#names[@]} -gt 0 ] || names=(
  annotated-types megatron-core msgspec pydantic pydantic-core pydantic-settings python-dotenv pyzmq
  typing-inspection xxhash zstandard
)
python=$root/.venv/bin/python
uv=$(command -v uv || echo "$root/.tools/bin/uv")
"$uv" cache dir >/dev/null 2>&1 || uv=$root/.tools/bin/uv

mapfile -t pins < <("$python" -c '
import sys
from importlib.metadata import version
for name in sys.argv[1:]:
    print(f"{name}=={version(name)}")
' "${names[@]}")
[ ${#pins[@]} -eq ${#names[@]} ] || exit 1 # a name that .venv does not have, which Python has told

platforms=()
for glibc in 2_17 2_24 2_26 2_27 2_28 2_31 2_34; do platforms+=(--platform "manylinux_${glibc}_x86_64"); done
mkdir -p "$folder"
"$uv" run --quiet --no-project --with pip --python "$python" python -m pip download --quiet --no-deps \
  --only-binary=:all: --implementation cp --python-version "$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')" \
  "${platforms[@]}" --platform manylinux2014_x86_64 --dest "$folder" "${pins[@]}"
ls -l "$folder"
