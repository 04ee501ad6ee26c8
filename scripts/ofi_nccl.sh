#!/usr/bin/env bash
# Ensures that NCCL has its libfabric plug-in, which EFA requires. The EFA installer has included it since 1.39. This script checks its
# version and adds it to the loader path, because NCCL finds libnccl-net*.so by name. https://github.com/aws/aws-ofi-nccl
set -euo pipefail
usage="usage: ofi_nccl.sh check|apply|verify LEAST EFA_VERSION EFA_KEY"
verb=${1:?$usage} least=${2:?$usage} efa=${3:?$usage} key=${4:?$usage}
home=${EFA_HOME:-/opt/amazon}
conf=${TRAINFLEET_ROOT:-}/etc/ld.so.conf.d/100_ofinccl.conf # same name as in the EFA installer

library() { find "$home/ofi-nccl" -name 'libnccl-net*.so*' 2> /dev/null | sort | head -n 1; }
packages() {
  if command -v dpkg-query > /dev/null; then
    dpkg-query -W -f '${Version}\n' 'libnccl-ofi*' 2> /dev/null
  else
    rpm -qa --qf '%{VERSION}\n' 'libnccl-ofi*'
  fi
}
version() { packages | sed 's/[-~+].*//' | grep . | sort -V | tail -n 1; }

verify() {
  [ -n "$(library)" ] || { echo "ofi-nccl: no libnccl-net*.so under $home/ofi-nccl"; return 1; }
  local found
  found=$(version || true)
  [ "$(printf '%s\n' "$least" "$found" | sort -V | head -n 1)" = "$least" ] || { echo "ofi-nccl: $found, wanted $least or newer"; return 1; }
  grep -qsF "$(dirname "$(library)")" "$conf" || { echo "ofi-nccl: $conf does not name its folder"; return 1; }
  echo "ofi-nccl: $found"
}

apply() {
  if [ -z "$(library)" ] || [ "$(printf '%s\n' "$least" "$(version || true)" | sort -V | head -n 1)" != "$least" ]; then
    rm -f "$home/efa_installed_packages" # makes efa.sh run the installer again, which includes the plug-in
    "$(dirname "$0")/efa.sh" apply "$efa" "$key"
  fi
  [ -n "$(library)" ] || { echo "ofi-nccl: EFA installer $efa brought no plug-in"; exit 1; }
  dirname "$(library)" > "$conf"
  ldconfig
}

case $verb in
  check | verify) verify ;;
  apply) verify > /dev/null || apply; verify ;;
  *) echo "$usage" >&2 && exit 2 ;;
esac
