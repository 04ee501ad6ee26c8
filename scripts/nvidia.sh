#!/usr/bin/env bash
# NVIDIA's data-centre driver, an exact version, built for the running kernel; the fabric manager of the same version where NVSwitch
# needs it. CUDA itself comes inside torch. Exits 3 when the machine must boot again before the driver works.
set -euo pipefail
usage="usage: nvidia.sh check|apply|verify VERSION open|proprietary SHA256 [SHA256_OF_THE_FABRIC_MANAGER]"
verb=${1:?$usage} version=${2:?$usage} modules=${3:?$usage} sum=${4:?$usage} manager=${5:-}
run=NVIDIA-Linux-x86_64-$version.run
url=https://us.download.nvidia.com/tesla/$version/$run
archive=fabricmanager-linux-x86_64-$version-archive
archives=https://developer.download.nvidia.com/compute/nvidia-driver/redist/fabricmanager/linux-x86_64

driver() { nvidia-smi --query-gpu=driver_version --format=csv,noheader 2> /dev/null | sort -u | paste -sd, -; }
manager_version() { nv-fabricmanager --version 2> /dev/null | grep -oE '[0-9]+(\.[0-9]+)+' | head -n 1; }

verify() {
  [ "$(driver)" = "$version" ] || { echo "nvidia: driver $(driver), wanted $version"; return 1; }
  [ -z "$manager" ] || [ "$(manager_version)" = "$version" ] ||
    { echo "nvidia: fabric manager $(manager_version), wanted $version"; return 1; }
  echo "nvidia: driver $version on $(nvidia-smi -L | wc -l) GPUs${manager:+, fabric manager $version}"
}

fetch() { "$(dirname "$0")/download.sh" apply "$@"; }

apply() {
  folder=$(mktemp -d)
  trap 'rm -rf "$folder"' EXIT
  if [ "$(driver)" != "$version" ]; then
    printf 'blacklist nouveau\noptions nouveau modeset=0\n' > /etc/modprobe.d/trainfleet-nouveau.conf
    fetch "$url" "$sum" "$folder/$run"
    sh "$folder/$run" --silent --dkms --no-questions --kernel-module-type="$modules" > "$folder/log" 2>&1 || { tail -n 20 "$folder/log"; exit 1; }
    if ! modprobe nvidia 2> /dev/null || [ "$(driver)" != "$version" ]; then # the old module is in use
      echo "nvidia: driver $version is installed, and loads at the next boot"
      exit 3
    fi
  fi
  if [ -n "$manager" ] && [ "$(manager_version)" != "$version" ]; then
    fetch "$archives/$archive.tar.xz" "$manager" "$folder/manager.tar.xz"
    tar -xJf "$folder/manager.tar.xz" -C "$folder"
    (cd "$folder/$archive/sbin" && bash ./fm_run_package_installer.sh > /dev/null)
    systemctl enable --now --quiet nvidia-fabricmanager
  fi
}

case $verb in
  check | verify) verify ;;
  apply) verify > /dev/null || apply; verify ;;
  *) echo "$usage" >&2 && exit 2 ;;
esac
