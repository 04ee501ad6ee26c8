#!/usr/bin/env bash
# Ensures an NVIDIA data-center driver: the existing one if it is new enough for the platform's CUDA, else Ubuntu's signed packages of one
# branch. With NVSwitch, it also ensures the fabric manager of exactly the same version. Packages from two sources are never mixed, because a
# driver and a fabric manager from different builds refuse to work together. CUDA itself ships with torch.
# Exits with 3 if the machine must reboot before the driver works.
set -euo pipefail
usage="usage: nvidia.sh check|apply|verify LEAST BELOW|- BRANCH open|proprietary [fabric]"
verb=${1:?$usage} least=${2:?$usage} below=${3:?$usage} branch=${4:?$usage} modules=${5:?$usage} fabric=${6:-}

driver() { nvidia-smi --query-gpu=driver_version --format=csv,noheader 2> /dev/null | sort -u | paste -sd, -; }
manager() { nv-fabricmanager --version 2> /dev/null | grep -oE '[0-9]+(\.[0-9]+)+' | head -n 1; }
older() { [ "$1" != "$2" ] && [ "$(printf '%s\n' "$1" "$2" | sort -V | head -n 1)" = "$1" ]; }
fits() { [ -n "$1" ] && ! older "$1" "$least" && { [ "$below" = - ] || older "$1" "$below"; }; }
wanted="$least or newer" && [ "$below" = - ] || wanted="$wanted, before $below"

verify() {
  fits "$(driver)" || { echo "nvidia: driver $(driver), wanted $wanted"; return 1; }
  [ -z "$fabric" ] || [ "$(manager)" = "$(driver)" ] || { echo "nvidia: fabric manager $(manager), wanted $(driver), the driver's version"; return 1; }
  echo "nvidia: driver $(driver) on $(nvidia-smi -L | wc -l) GPUs${fabric:+, with its fabric manager}"
}

refuse() { echo "nvidia: $1; choose an image that brings a driver $wanted (fleet.aws.ami)"; exit 1; }
has_foreign() { command -v nvidia-smi > /dev/null && ! dpkg -S "$(readlink -f "$(command -v nvidia-smi)")" 2> /dev/null | grep -q "^nvidia-utils-[0-9]*-server"; }
version_of() { apt-cache policy "$1" | sed -n 's/^  Candidate: //p'; }

apply() {
  local name version packages=()
  command -v apt-get > /dev/null || refuse "this distribution has no signed packages of it that setup installs"
  ! has_foreign || refuse "driver $(driver) is not of Ubuntu's packages, and setup does not mix two sources"
  apt-get update -qq
  name=nvidia-headless-$branch-server && [ "$modules" = proprietary ] || name=$name-open
  packages=("$name" "nvidia-utils-$branch-server" ${fabric:+"nvidia-fabricmanager-$branch"})
  version=$(version_of "$name")
  fits "${version%%-*}" || refuse "Ubuntu's archive has ${version:-nothing} as $name"
  for name in "${packages[@]}"; do
    [ "$(v=$(version_of "$name") && echo "${v%%-*}")" = "${version%%-*}" ] ||
      refuse "Ubuntu's archive has $name $(version_of "$name") beside a driver ${version%%-*}"
  done
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq -o DPkg::Lock::Timeout=300 --no-install-recommends "${packages[@]}" > /dev/null
  [ -z "$fabric" ] || systemctl enable --now --quiet nvidia-fabricmanager
  modprobe nvidia 2> /dev/null || true # fails if the old module is in use; the next line checks the loaded version
  fits "$(driver)" || { echo "nvidia: driver ${version%%-*} is installed, and loads at the next boot"; exit 3; }
}

case $verb in
  check | verify) verify ;;
  apply) verify > /dev/null || apply; verify ;;
  *) echo "$usage" >&2 && exit 2 ;;
esac
