#!/usr/bin/env bash
# Installs exact versions of the Neuron driver, runtime, collectives and tools from Neuron's own repository.
# https://awsdocs-neuron.readthedocs-hosted.com/en/latest/setup/ - usage: neuron.sh apply KEY aws-neuronx-dkms=VERSION ...
# Supports only apt: RPM versions contain the commit (2.33.10.0_3dcef56f0-1), and the glibc of RPM systems is too old for torch.
# With TRAINFLEET_HOST=image, it neither loads the driver nor checks devices, because they belong to the host.
set -euo pipefail
usage="usage: neuron.sh check|apply|verify KEY PACKAGE=VERSION..."
verb=${1:?$usage} key=${2:?$usage}
shift 2
[ $# -gt 0 ] || { echo "$usage" >&2 && exit 2; }
apt=https://apt.repos.neuron.amazonaws.com
published=GPG-PUB-KEY-AMAZON-AWS-NEURON.PUB

installed() { dpkg-query -W -f '${Version}' "$1" 2> /dev/null | sed 's/[-~+].*//' || true; } # without the distribution's suffix; empty if not installed

verify() {
  local pin found
  for pin in "$@"; do
    found=$(installed "${pin%%=*}")
    [ "$found" = "${pin##*=}" ] || { echo "neuron: ${pin%%=*} ${found:-missing}, wanted ${pin##*=}"; return 1; }
  done
  [ "${TRAINFLEET_HOST:-}" != image ] || { echo "neuron: $# packages as pinned"; return 0; }
  compgen -G '/dev/neuron[0-9]*' > /dev/null || { echo "neuron: no /dev/neuron* device: modprobe neuron; dmesg | grep neuron"; return 1; }
  echo "neuron: $# packages as pinned, $(compgen -G '/dev/neuron[0-9]*' | wc -l) devices"
}

apply() {
  # shellcheck disable=SC1091
  . /etc/os-release
  command -v apt-get > /dev/null || { echo "neuron: $ID $VERSION_ID has no apt; Neuron's packages are installed on Ubuntu 22.04 or 24.04 only"; exit 1; }
  export DEBIAN_FRONTEND=noninteractive
  "$(dirname "$0")/key.sh" apply "$apt/$published" "$key" /etc/apt/keyrings/neuron.gpg
  echo "deb [signed-by=/etc/apt/keyrings/neuron.gpg] $apt $VERSION_CODENAME main" > /etc/apt/sources.list.d/neuron.list
  apt-get update -qq
  apt-get install -y -qq -o DPkg::Lock::Timeout=300 --allow-downgrades --allow-change-held-packages "${@/%/*}" > /dev/null
  apt-mark hold "${@%%=*}" > /dev/null # prevents unattended upgrades
  [ "${TRAINFLEET_HOST:-}" = image ] || modprobe neuron
}

case $verb in
  check | verify) verify "$@" ;;
  apply) verify "$@" > /dev/null || apply "$@"; verify "$@" ;;
  *) echo "$usage" >&2 && exit 2 ;;
esac
