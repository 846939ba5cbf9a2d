#!/usr/bin/env bash
# Run one member's tests against the lowest versions its bounds allow, or the newest there are, pre-releases included.
#   bash tools/test_resolution.sh lowest omt
set -euo pipefail
versions=$1 name=$2
path=$(uv run --quiet --no-project --python 3.11 python tools/members.py paths "$name")

case $versions in
  lowest) options=(--resolution lowest-direct) ;;
  newest) options=(--resolution highest --prerelease allow) ;;
  *) echo "versions must be 'lowest' or 'newest', not '$versions'" >&2; exit 2 ;;
esac

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
uv venv --quiet --python 3.11 "$work/venv"
export VIRTUAL_ENV="$work/venv"
uv pip install --quiet "${options[@]}" -e "$path[all,test]" --group test -e shared/core
uv pip list
"$work/venv/bin/python" -m pytest "$path/tests" -n 2
