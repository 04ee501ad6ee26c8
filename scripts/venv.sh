#!/usr/bin/env bash
# .venv from the lock files: check (is it there?), apply (build it), verify (do the packages load?).
# uv is used where it is there; plain venv and pip do the same, slower: TRAINFLEET_PIP=pip.
set -euo pipefail
cd "$(dirname "$0")/.."
verb=${1:?usage: venv.sh check|apply|verify [lock ...]}; shift
python=.venv/bin/python
cpu_index=https://download.pytorch.org/whl/cpu # PyTorch's own index of builds without CUDA

uses_uv() { [ "${TRAINFLEET_PIP:-}" != pip ] && command -v uv > /dev/null; }
is_whole() { [ -x "$python" ] && { uses_uv || "$python" -m pip --version > /dev/null 2>&1; }; } # one whose making was stopped is not
needs_cuda() { "$python" -c 'import importlib.metadata as m; exit(not any("nvidia" in r for r in m.requires("torch") or ()))' 2> /dev/null; }
has_gpu() { [ -d /proc/driver/nvidia/gpus ] || compgen -G '/dev/nvidia[0-9]*' > /dev/null; }

install() { # as pip install, silent unless it fails; nothing that the locks do not name by its SHA-256
  local words=("$python" -m pip install --quiet --quiet --disable-pip-version-check)
  ! uses_uv || words=(uv pip install --quiet --python "$python")
  python3 scripts/pip_sources.py run "${words[@]}" --require-hashes --no-deps "$@"
}

install_cpu_torch() { # a tenth of the usual build's size; where it can't be had in seconds, the usual one does
  [ "$(uname -sm)" = 'Linux x86_64' ] && ! has_gpu || return 0
  awk '/^[^ ]/ { torch = sub(/^torch==[0-9.]+/, "&+cpu") } torch' "$@" | tee .venv/torch.lock | grep -c . > /dev/null || return 0 # uv wants +cpu
  (export PIP_DEFAULT_TIMEOUT=8 PIP_RETRIES=0 UV_HTTP_TIMEOUT=8 UV_HTTP_RETRIES=0
    install --index-url "$cpu_index" --requirement .venv/torch.lock || install --requirement .venv/torch.lock) 2> /dev/null ||
    echo "PyTorch's index of CPU builds can't be reached, or has none that the lock knows; taking the usual build of torch"
}

take_turns() { # of two first makes the second waits, and finds the packages there; flock is Python's, as macOS has no program for it
  exec 9>> .venv.lock; python3 -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)' 2> /dev/null && return
  echo "another make is installing into .venv; waiting for it ..."
  python3 -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX)' 2> /dev/null || true # a file system without locks
}

apply() {
  local lock files=(); for lock in "$@"; do files+=(--requirement "$lock"); done
  trap 'echo "stopped; the same command begins again where it has to" >&2; exit 130' INT TERM
  python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2> /dev/null ||
    { echo "trainfleet needs Python 3.11 or newer as python3; $(python3 --version 2> /dev/null || echo 'there is none: install python3 and python3-venv')" >&2 && exit 1; }
  python3 scripts/pip_sources.py check || exit 1
  echo "installing $* into .venv with $(uses_uv && echo uv || echo pip) ..."
  { sleep "${TRAINFLEET_REMIND:-15}" > /dev/null 2>&1; echo "still at it: some hundred MB are loaded, or the package index does not answer (pip config list names it)"; } &
  reminder=$!; trap 'kill "$reminder" 2> /dev/null || true' EXIT
  take_turns
  is_whole || { rm -rf .venv; if uses_uv; then uv venv --quiet .venv; else python3 -m venv .venv; fi; }
  install_cpu_torch "$@"; install "${files[@]}"
  ! needs_cuda || install --requirement requirements-cuda.lock # which torch's usual build for Linux asks for
  touch .venv/.stamp
}

case $verb in
  check) [ -e .venv/.stamp ] ;;
  apply) apply "$@" ;;
  verify) "$python" -c 'import torch, yaml, tokenizers' ;;
  *) echo "usage: venv.sh check|apply|verify [lock ...]" >&2 && exit 2 ;;
esac
