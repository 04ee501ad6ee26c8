#!/usr/bin/env bash
# Writes requirements*.lock from pyproject.toml, with the SHA-256 of each package file. `check` (= `verify`) tests whether they are up to date.
# Needs uv. -extras is for hf:// sources, fp8 and make eval TASKS: scripts/venv.sh apply requirements-extras.lock. -cuda has CUDA's packages,
# which only torch's default Linux build needs. Hashes of that build come from the package registry, those of the CPU builds from
# docker/platforms.lock.yaml, because PyTorch's own index has different files for the same version.
set -euo pipefail
cd "$(dirname "$0")/.."

compile() { # one file for all platforms and Python versions
  uv pip compile --quiet --universal --python-version 3.11 --no-header --no-annotate --generate-hashes --no-emit-find-links \
    --no-emit-index-url "$@" pyproject.toml
}

requirements() { # cuda|other; a requirement is one line, and its hashes are the indented lines below
  awk -v wanted="$1" '/^[^ ]/ { kind = /^(nvidia|cuda)-|^triton==/ ? "cuda" : /sys_platform == .emscripten/ ? "none" : "other" } kind == wanted'
}

add_cpu_builds() { # adds the hashes of the CPU builds to torch's
  awk -v hashes="$(awk '/cpu_wheels:/ { on = 1; next } on && !/^ *cp/ { on = 0 } on { print $2 }' docker/platforms.lock.yaml)" '
    { print }
    /^torch==/ { count = split(hashes, each); for (i = 1; i <= count; i++) print "    --hash=sha256:" each[i] " \\" }'
}

write() { # FOLDER
  local all
  all=$(compile)
  requirements other <<< "$all" | add_cpu_builds > "$1/requirements.lock"
  requirements cuda <<< "$all" > "$1/requirements-cuda.lock"
  compile --extra data --extra test --extra check | requirements other | add_cpu_builds > "$1/requirements-test.lock"
  compile --extra data --extra fp8 --extra eval | requirements other | add_cpu_builds > "$1/requirements-extras.lock"
}

case ${1:-} in
  apply) write . ;;
  check | verify)
    fresh=$(mktemp -d)
    trap 'rm -rf "$fresh"' EXIT
    write "$fresh"
    for lock in requirements{,-cuda,-test,-extras}.lock; do diff "$lock" "$fresh/$lock"; done
    ;;
  *) echo "usage: lock.sh check|apply|verify" >&2 && exit 2 ;;
esac
