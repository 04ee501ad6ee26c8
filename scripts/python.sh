#!/usr/bin/env bash
# The Python environment of the fleet, in a folder that all nodes share: requirements.lock, with torch and its kin as the stack pins
# them. Built beside its place and moved there whole; uv is used where it is there. A `-` stands for no extra index.
set -euo pipefail
usage="usage: python.sh check|apply|verify FOLDER TORCH_INDEX EXTRA_INDEX PIN..."
verb=${1:?$usage} folder=${2:?$usage} torch_index=${3:?$usage} extra=${4:?$usage}
shift 4
lock=$(cd "$(dirname "$0")/.." && pwd)/requirements.lock
torch=${1:?$usage}

newest() { # this toolkit needs 3.11; torch and Neuron have builds up to 3.13
  local minor
  for minor in 13 12 11; do "python3.$minor" -c 'import ensurepip' 2> /dev/null && command -v "python3.$minor" && return; done
  echo "python: no Python 3.11 to 3.13 that can make environments on this node" >&2 && return 1
}

verify() {
  [ -e "$folder/.complete" ] || { echo "python: $folder is not complete"; return 1; }
  local found
  found=$("$folder/bin/python" -c 'from importlib.metadata import version; print(version("torch"))') || return 1
  [ "${found%%+*}" = "${torch##*==}" ] || { echo "python: torch $found in $folder, wanted ${torch##*==}"; return 1; }
  echo "python: $folder, torch $found"
}

install() {
  if command -v uv > /dev/null; then uv pip install --quiet --python "$folder/bin/python" "$@"; else "$folder/bin/python" -m pip install -q "$@"; fi
}

apply() {
  local python
  python=$(newest)
  rm -rf "$folder"
  mkdir -p "${folder%/*}"
  pins=$(mktemp) # not local: the trap outlives this function
  trap 'rm -f "$pins"' EXIT
  grep -v '^torch==' "$lock" > "$pins"
  if command -v uv > /dev/null; then uv venv --quiet --relocatable --python "$python" "$folder"; else "$python" -m venv "$folder"; fi
  install --index-url "$torch_index" --no-deps "$torch"
  [ $# -lt 2 ] || install --extra-index-url "$extra" "${@:2}"
  install --requirement "$pins" "$torch"
  touch "$folder/.complete" # last: without it the folder counts as not there
}

case $verb in
  check | verify) verify ;;
  apply) verify > /dev/null 2>&1 || apply "$@"; verify ;;
  *) echo "$usage" >&2 && exit 2 ;;
esac
