#!/usr/bin/env bash
# Installs compilers, git, curl and a Python 3.11 or newer that can create environments; with `headers`, also the headers of the running
# kernel, for building drivers. `verify` is the same as `check`. Runs as root on Ubuntu 22.04/24.04, Debian 12, Amazon Linux 2023.
set -euo pipefail
usage="usage: build_tools.sh check|apply|verify [headers]"
verb=${1:?$usage}
headers=${2:-}
kernel=$(uname -r)

has_python() {
  local minor
  for minor in 13 12 11; do ! "python3.$minor" -c 'import ensurepip' 2> /dev/null || return 0; done
  return 1
}

missing() { # one line per missing item
  local program
  for program in gcc make curl tar git; do command -v "$program" > /dev/null || echo "$program"; done
  has_python || echo "python 3.11 or newer"
  [ -z "$headers" ] || [ -e "/lib/modules/$kernel/build" ] || echo "headers of kernel $kernel"
}

python_package() { # Ubuntu 22.04 has 3.11 in addition to 3.10; same order of preference as python.sh
  local minor
  for minor in 12 11 13; do apt-cache show "python3.$minor-venv" > /dev/null 2>&1 && echo "python3.$minor-venv" && return; done
  echo "build tools: this distribution has no Python 3.11 or newer" >&2 && return 1
}

apply() {
  local python
  if command -v apt-get > /dev/null; then
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq
    python=$(has_python || python_package)
    # Wait for dpkg's lock, which another process may hold right after boot.
    apt-get install -y -qq -o DPkg::Lock::Timeout=300 build-essential curl git tar ${python:+"$python"} \
      ${headers:+dkms "linux-headers-$kernel"} > /dev/null
  else
    dnf install -y -q gcc make curl-minimal git tar python3.12 python3.12-pip ${headers:+dkms "kernel-devel-$kernel" "kernel-headers-$kernel"}
  fi
}

verify() {
  local left
  left=$(missing | paste -sd, -)
  [ -z "$left" ] || { echo "build tools: missing: $left"; return 1; }
  echo "build tools: all there${headers:+, with the headers of kernel $kernel}"
}

case $verb in
  check | verify) verify ;;
  apply) verify > /dev/null || apply; verify ;;
  *) echo "$usage" >&2 && exit 2 ;;
esac
