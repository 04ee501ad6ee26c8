#!/usr/bin/env bash
# requirements*.lock from pyproject.toml (check: current?, apply: write them, verify = check). Needs uv.
# CUDA's own packages are left out: torch pins them itself, and its CPU build has none.
set -euo pipefail
cd "$(dirname "$0")/.."

compile() { # every platform and Python in one file
  uv pip compile --quiet --universal --python-version 3.11 --no-header --no-annotate "$@" pyproject.toml |
    grep -vE "^(nvidia|cuda)-|^triton==|sys_platform == 'emscripten'"
}

write() { # where to
  compile > "$1/requirements.lock"
  compile --extra data --extra test --extra check > "$1/requirements-test.lock"
}

case ${1:-} in
  apply) write . ;;
  check | verify)
    fresh=$(mktemp -d)
    trap 'rm -rf "$fresh"' EXIT
    write "$fresh"
    diff requirements.lock "$fresh/requirements.lock" && diff requirements-test.lock "$fresh/requirements-test.lock"
    ;;
  *) echo "usage: lock.sh check|apply|verify" >&2 && exit 2 ;;
esac
