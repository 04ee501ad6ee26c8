#!/usr/bin/env bash
# Builds .venv from the lock files. `check` tests whether it exists, and `verify` whether the packages load.
# Uses uv if available, else the slower venv and pip, which TRAINFLEET_PIP=pip forces.
set -euo pipefail
cd "$(dirname "$0")/.."
verb=${1:?usage: venv.sh check|apply|verify [lock ...]}; shift
python=.venv/bin/python
cpu_index=https://download.pytorch.org/whl/cpu # PyTorch's own index of builds without CUDA

uses_uv() { [ "${TRAINFLEET_PIP:-}" != pip ] && command -v uv > /dev/null; }
is_whole() { [ -x "$python" ] && { uses_uv || "$python" -m pip --version > /dev/null 2>&1; }; } # fails if creating it was interrupted
needs_cuda() { "$python" -c 'import importlib.metadata as m; exit(not any("nvidia" in r for r in m.requires("torch") or ()))' 2> /dev/null; }
has_gpu() { [ -d /proc/driver/nvidia/gpus ] || compgen -G '/dev/nvidia[0-9]*' > /dev/null; }

install() { # like pip install, but silent unless it fails, and only for packages with a SHA-256 in the locks
  local words=("$python" -m pip install --quiet --quiet --disable-pip-version-check)
  ! uses_uv || words=(uv pip install --quiet --python "$python")
  python3 scripts/pip_sources.py run "${words[@]}" --require-hashes --no-deps "$@"
}

install_cpu_torch() { # a tenth of the default build's size; falls back to the default build if not available within seconds
  [ "$(uname -sm)" = 'Linux x86_64' ] && ! has_gpu || return 0
  awk '/^[^ ]/ { torch = sub(/^torch==[0-9.]+/, "&+cpu") } torch' "$@" | tee .venv/torch.lock | grep -c . > /dev/null || return 0 # uv requires +cpu
  (export PIP_DEFAULT_TIMEOUT=8 PIP_RETRIES=0 UV_HTTP_TIMEOUT=8 UV_HTTP_RETRIES=0
    install --index-url "$cpu_index" --requirement .venv/torch.lock || install --requirement .venv/torch.lock) 2> /dev/null ||
    echo "PyTorch's index of CPU builds can't be reached, or has none that the lock knows; taking the usual build of torch"
}

take_turns() { # of two concurrent makes, the second waits; uses Python's flock, because macOS has no flock program
  exec 9>> .venv.lock; python3 -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)' 2> /dev/null && return
  echo "another make is installing into .venv; waiting for it ..."
  python3 -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX)' 2> /dev/null || true # the file system may not support locks
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
  ! needs_cuda || install --requirement requirements-cuda.lock # dependencies of torch's default Linux build
  touch .venv/.stamp
}

case $verb in
  check) [ -e .venv/.stamp ] ;;
  apply) apply "$@" ;;
  verify) "$python" -c 'import torch, yaml, tokenizers' ;;
  *) echo "usage: venv.sh check|apply|verify [lock ...]" >&2 && exit 2 ;;
esac
