#!/usr/bin/env bash
# Compilers, git, curl and Python; with the word `headers` also those of the running kernel, for drivers that are built here.
# check: is all there?  apply: install what is not.  verify = check. As root; Ubuntu 22.04/24.04, Debian 12, Amazon Linux 2023.
set -euo pipefail
verb=${1:?usage: build_tools.sh check|apply|verify [headers]}
headers=${2:-}
kernel=$(uname -r)

missing() { # one line a thing
  local program
  for program in gcc make curl tar git python3; do command -v "$program" > /dev/null || echo "$program"; done
  python3 -c 'import venv, ensurepip' 2> /dev/null || echo venv
  [ -z "$headers" ] || [ -e "/lib/modules/$kernel/build" ] || echo "headers of kernel $kernel"
}

apply() {
  if command -v apt-get > /dev/null; then
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq
    # Another process may hold dpkg's lock on a machine that has just booted: wait for it.
    apt-get install -y -qq -o DPkg::Lock::Timeout=300 build-essential curl git tar python3 python3-venv \
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
  *) echo "usage: build_tools.sh check|apply|verify [headers]" >&2 && exit 2 ;;
esac
