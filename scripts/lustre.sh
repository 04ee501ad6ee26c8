#!/usr/bin/env bash
# Installs FSx's Lustre client with a module for the running kernel. If FSx has no module for it, installs the newest kernel that has one,
# makes it GRUB's default, and checks it again after the reboot. Exits with 3 if the machine must reboot.
set -euo pipefail
usage="usage: lustre.sh check|apply|verify KEY"
verb=${1:?$usage} key=${2:?$usage} root=${TRAINFLEET_ROOT:-}
grub=$root/etc/default/grub.d/99-trainfleet.cfg menu=$root/boot/grub/grub.cfg
repository=https://fsx-lustre-client-repo.s3.amazonaws.com/ubuntu
keys=https://fsx-lustre-client-repo-public-keys.s3.amazonaws.com/fsx-ubuntu-public-key.asc
kernel=$(uname -r) boot=$(cat /proc/sys/kernel/random/boot_id)
otherwise="choose an image with a kernel of https://docs.aws.amazon.com/fsx/latest/LustreGuide/lustre-client-matrix.html (fleet.aws.ami)"

verify() { # modinfo does not load the module; LNet must be configured for EFA before Lustre loads
  { command -v mount.lustre && modinfo lustre; } > /dev/null 2>&1 || { echo "lustre: no client for kernel $kernel"; return 1; }
  echo "lustre: client for kernel $kernel"
}

refuse() { echo "lustre: $1; $otherwise"; exit 1; }
install() { DEBIAN_FRONTEND=noninteractive apt-get install -y -qq -o DPkg::Lock::Timeout=300 "$@" > /dev/null; }
offered() { apt-cache show "$1" > /dev/null 2>&1; }
newest() { # newest kernel with a module that the distribution still offers
  apt-cache search --names-only '^lustre-client-modules-[0-9].*-aws$' | sed 's/^lustre-client-modules-//; s/ .*//' | sort -Vr |
    while read -r version; do ! offered "linux-image-$version" || { echo "$version"; break; }; done
}

hold() { dpkg-query -W -f '${Package}\n' linux-aws linux-image-aws linux-headers-aws 2> /dev/null | xargs -r apt-mark hold > /dev/null || true; } # they may not be installed
switch() {
  local new
  [ ! -e "$grub" ] || grep -q "$boot" "$grub" || refuse "kernel $kernel booted, and not the one that $grub names"
  new=$(newest)
  [ -n "$new" ] || refuse "FSx has no module for kernel $kernel, nor for one that this distribution offers"
  [ ! -d "$root/sys/module/nvidia" ] || dkms status 2> /dev/null | grep -q nvidia ||
    refuse "FSx has no module for kernel $kernel, and the NVIDIA driver of this image is built for that kernel alone"
  install "linux-image-$new" "linux-headers-$new" lustre-client-utils "lustre-client-modules-$new"
  mkdir -p "${grub%/*}"
  printf '# written in boot %s\nGRUB_DEFAULT="Advanced options for Ubuntu>Ubuntu, with Linux %s"\n' "$boot" "$new" > "$grub"
  update-grub > /dev/null 2>&1
  grep -qF "'Ubuntu, with Linux $new'" "$menu" || refuse "GRUB's menu has no kernel $new"
  hold
  echo "lustre: no module for kernel $kernel; kernel $new, which has one, is GRUB's default and boots next"
  exit 3
}

apply() {
  command -v apt-get > /dev/null || { dnf install -y -q lustre-client; return; } # Amazon Linux kernels include the modules
  "$(dirname "$0")/key.sh" apply "$keys" "$key" "$root/etc/apt/keyrings/fsx.gpg" > /dev/null
  mkdir -p "$root/etc/apt/sources.list.d"
  echo "deb [signed-by=/etc/apt/keyrings/fsx.gpg] $repository $(sed -n 's/^VERSION_CODENAME=//p' /etc/os-release) main" > "$root/etc/apt/sources.list.d/fsx.list"
  apt-get update -qq
  offered "lustre-client-modules-$kernel" || switch
  install lustre-client-utils "lustre-client-modules-$kernel"
  hold # an unattended upgrade would install a kernel without the module
}

case $verb in
  check | verify) verify ;;
  apply) verify > /dev/null || apply; verify ;;
  *) echo "$usage" >&2 && exit 2 ;;
esac
