#!/usr/bin/env bash
# Resolve rayhive with all its extras in a scratch environment and pin the result.
#
# torch keeps its pin unless TORCH names another version, because an open range may resolve to a
# build for other hardware. Run it on a machine without a GPU: otherwise CUDA's packages are pinned.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

torch=${TORCH:-$(sed -n 's/^torch==//p' constraints.txt)}
echo "torch==$torch" >"$scratch/pins.txt"

"${PYTHON:-python3}" -m venv "$scratch/venv"
python=$scratch/venv/bin/python
"$python" - >"$scratch/build.txt" <<'PY'
import tomllib

with open("pyproject.toml", "rb") as file:
    print(*tomllib.load(file)["build-system"]["requires"], sep="\n")
PY
echo "resolving; a minute or two ..."
"$python" -m pip install -qq --disable-pip-version-check -c "$scratch/pins.txt" \
    -r "$scratch/build.txt" '.[dev,docs,fast,postgresql]'
"$python" -m pip check

{
    cat <<HEADER
# Every package that rayhive, its extras and its build need, pinned: what the tests ran with.
# make installs with it. A user who wants another build of torch installs without it.
# Resolved with $("$python" -V); where that is too new or too old, install without it as well.
# Refresh with: make constraints
HEADER
    # A local version (+cpu, +cu126) names a build, not a version: leave the build open.
    "$python" -m pip freeze --all --exclude rayhive --exclude pip --exclude wheel |
        sed 's/+[A-Za-z0-9.]*$//' | LC_ALL=C sort -f
} >"$scratch/constraints.txt"

if grep -nE '@|://|^-' "$scratch/constraints.txt"; then
    echo "these lines are not pins; constraints.txt is unchanged" >&2
    exit 1
fi
mv "$scratch/constraints.txt" constraints.txt
echo "constraints.txt: $(grep -c == constraints.txt) pins"
