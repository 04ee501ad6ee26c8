#!/usr/bin/env bash
# Builds the fleet's Python environment in a folder that all nodes share, from requirements.lock and the platform's torch pin. Uses uv if
# available. `-` means the default index (TORCH_INDEX) or none (OTHER_INDEX). Neuron's packages have only exact versions, no SHA-256.
set -euo pipefail
usage="usage: python.sh check|apply|verify FOLDER TORCH_INDEX OTHER_INDEX TORCH [--hash=...]... [PIN --hash=...]... PIN..."
verb=${1:?$usage} folder=${2:?$usage} torch_index=${3:?$usage} other=${4:?$usage} torch=${5:?$usage}
shift 5; hashes=() checked=() # checked: pins from the default index, with their hashes
while [[ ${1:-} == --hash=* ]]; do hashes+=("$1"); shift; done
while [[ ${2:-} == --hash=* ]]; do checked+=("$1"); shift; while [[ ${1:-} == --hash=* ]]; do checked[-1]+=" $1"; shift; done; done
locks=$(cd "$(dirname "$0")/.." && pwd)

choose() { # trainfleet needs 3.11; torch and Neuron have builds up to 3.13, and the lock has hashes of each for 3.11 and 3.12
  for minor in 12 11 13; do "python3.$minor" -c 'import ensurepip' 2> /dev/null && command -v "python3.$minor" && return; done
  echo "python: no Python 3.11 to 3.13 that can make environments on this node" >&2 && return 1
}

verify() {
  [ -e "$folder/.complete" ] || { echo "python: $folder is not complete"; return 1; }
  found=$("$folder/bin/python" -c 'from importlib.metadata import version; print(version("torch"))') || return 1
  [ "${found%%+*}" = "${torch##*==}" ] || { echo "python: torch $found in $folder, wanted ${torch##*==}"; return 1; }
  echo "python: $folder, torch $found"
}

install() { # ignores the node owner's pip constraints and other settings
  local words=("$folder/bin/python" -m pip install -q)
  ! command -v uv > /dev/null || words=(uv pip install --quiet --python "$folder/bin/python")
  "$python" "$locks/scripts/pip_sources.py" run "${words[@]}" "$@"
}

lines_of() { awk -v wanted="$1" '/^[^ ]/ { kind = /^torch==/ ? "torch" : "rest" } kind == wanted' "$locks/requirements.lock"; }

apply() {
  local python index=(--index-url "$torch_index") build=+${torch_index##*/}
  python=$(choose)
  [ "$torch_index" != - ] || index=() build=""
  [ ${#hashes[@]} -gt 0 ] || lines_of torch | grep -q "^$torch " ||
    { echo "python: neither requirements.lock nor docker/platforms.lock.yaml has a SHA-256 of $torch" && exit 1; }
  "$python" "$locks/scripts/pip_sources.py" check
  rm -rf "$folder" && mkdir -p "${folder%/*}"
  if command -v uv > /dev/null; then uv venv --quiet --relocatable --python "$python" "$folder"; else "$python" -m venv "$folder"; fi
  if [ ${#hashes[@]} -gt 0 ]; then echo "$torch ${hashes[*]}"; else lines_of torch; fi | sed "s/^torch==[0-9.]*/&$build/" > "$folder/torch.lock"
  { lines_of rest; printf '%s\n' "${checked[@]}"; } > "$folder/rest.lock"
  install --no-deps --require-hashes "${index[@]}" --requirement "$folder/torch.lock"
  install --no-deps --require-hashes --requirement "$folder/rest.lock"
  [ -n "$build" ] || install --no-deps --require-hashes --requirement "$locks/requirements-cuda.lock"
  if [ $# -gt 0 ]; then
    install --no-deps --index-url "$other" "$@"
    left=$("$folder/bin/python" "$locks/scripts/unpinned.py" "${@%%=*}")
    [ -z "$left" ] || { echo "python: $left is asked for, and pinned nowhere: add it to docker/platforms.lock.yaml"; exit 1; }
  fi
  [ $# -eq 0 ] && [ ${#hashes[@]} -eq 0 ] || install "$torch" "$@" # dependencies that are not in the lock, from the default index
  touch "$folder/.complete" # last, because a folder without this file counts as missing
}

case $verb in
  check | verify) verify ;;
  apply) verify > /dev/null 2>&1 || apply "$@"; verify ;;
  *) echo "$usage" >&2 && exit 2 ;;
esac
