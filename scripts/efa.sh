#!/usr/bin/env bash
# Installs the Elastic Fabric Adapter (kernel module, rdma-core, libfabric and the OFI-NCCL plug-in) from one pinned installer,
# unless the machine image already has version LEAST or newer.
# `verify` queries libfabric: `fi_info -p efa` must list an endpoint. https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-start.html
# With TRAINFLEET_HOST=image, only the container's part is installed and checked, because the host provides the kernel module and limits.
set -euo pipefail
usage="usage: efa.sh check|apply|verify VERSION KEY [LEAST]"
verb=${1:?$usage} version=${2:?$usage} key=${3:?$usage} least=${4:-$2}
home=${EFA_HOME:-/opt/amazon}
from=https://efa-installer.amazonaws.com
url=$from/aws-efa-installer-$version.tar.gz

installed() { sed -n '1s/.*: *v\{0,1\}//p' "$home/efa_installed_packages" 2> /dev/null; }
fi_info() { if [ -x "$home/efa/bin/fi_info" ]; then "$home/efa/bin/fi_info" "$@"; else command fi_info "$@"; fi; }
endpoints() { fi_info -p efa -t FI_EP_RDM 2> /dev/null | grep -c 'provider: efa' || true; } # grep fails if the count is 0, which is a valid result
is_new_enough() { [ "$(printf '%s\n' "$least" "$(installed)" | sort -V | head -n 1)" = "$least" ]; }
in_image() { [ "${TRAINFLEET_HOST:-}" = image ]; }
loaded() { [ -d /sys/module/ib_uverbs ] || lsmod | grep -q '^ib_uverbs'; }

verify() {
  is_new_enough || { echo "efa: installer $(installed || true), wanted $least or newer"; return 1; }
  ! in_image || { echo "efa: $(installed)"; return 0; }
  loaded || { echo "efa: ib_uverbs is not loaded"; return 1; }
  [ "$(endpoints)" -gt 0 ] || { echo "efa: fi_info -p efa lists no endpoint; is an EFA interface attached to this instance?"; return 1; }
  echo "efa: $(installed), $(endpoints) endpoints"
}

apply() {
  if ! is_new_enough; then
    folder=$(mktemp -d)
    trap 'rm -rf "$folder"' EXIT
    for file in "" .sig; do
      curl -fsSL --retry 3 -o "$folder/efa.tar.gz$file" "$url$file" || { echo "efa: can't download $url$file"; exit 1; }
    done
    "$(dirname "$0")/key.sh" apply "$from/aws-efa-installer.key" "$key" "$folder/key.gpg"
    gpgv --keyring "$folder/key.gpg" "$folder/efa.tar.gz.sig" "$folder/efa.tar.gz" 2> "$folder/log" ||
      { echo "efa: $url is not signed by $key: $(tail -n 1 "$folder/log")"; exit 1; }
    tar -xzf "$folder/efa.tar.gz" -C "$folder"
    options=(-y) && ! in_image || options+=(--skip-kmod --skip-limit-conf --no-verify)
    (cd "$folder/aws-efa-installer" && ./efa_installer.sh "${options[@]}" > "$folder/log" 2>&1) || { tail -n 20 "$folder/log"; exit 1; }
  fi
  ! in_image || return 0
  loaded || modprobe ib_uverbs # it is sometimes unloaded; the file below loads it at every boot
  echo ib_uverbs > /etc/modules-load.d/trainfleet-efa.conf
}

case $verb in
  check | verify) verify ;;
  apply) verify > /dev/null || apply; verify ;;
  *) echo "$usage" >&2 && exit 2 ;;
esac
