#!/usr/bin/env bash
# The Lustre client, and an FSx file system mounted now and at every boot: fsx.sh apply fs-0123.fsx.us-east-1.amazonaws.com@tcp:/abcd /fsx
# Exits 3 when a client was installed that needs another kernel, so another boot.
# https://docs.aws.amazon.com/fsx/latest/LustreGuide/install-lustre-client.html - data linked to S3 shows as files, loaded when read.
set -euo pipefail
usage="usage: fsx.sh check|apply|verify DNS_NAME@tcp:/MOUNT_NAME FOLDER KEY"
verb=${1:?$usage}
export source=${2:?$usage} folder=${3:?$usage} key=${4:?$usage} # source and folder become fields of fstab; no part of the folder is `..`
[[ $folder =~ ^(/[A-Za-z0-9_][A-Za-z0-9._-]*)+$ && $source =~ ^[A-Za-z0-9][A-Za-z0-9.-]*@tcp[0-9]*:/[A-Za-z0-9_-]+$ ]] || { echo "$usage" >&2; exit 2; }
table=${TRAINFLEET_ROOT:-}/etc/fstab
mounts=${TRAINFLEET_MOUNTS:-/proc/mounts}
repository=https://fsx-lustre-client-repo.s3.amazonaws.com/ubuntu
keys=https://fsx-lustre-client-repo-public-keys.s3.amazonaws.com/fsx-ubuntu-public-key.asc
options=noatime,flock,_netdev,x-systemd.automount # flock: checkpoints and git take locks

mounted() { name=":/${source##*:/}" awk '$2 == ENVIRON["folder"] && $3 == "lustre" && index($1, ENVIRON["name"])' "$mounts" | grep -q .; }
at_boot() { awk '$1 == ENVIRON["source"] && $2 == ENVIRON["folder"] && $3 == "lustre"' "$table" | grep -q .; }

verify() {
  mounted || { echo "fsx: $source is not mounted at $folder"; return 1; }
  lctl get_param -n version > /dev/null || { echo "fsx: the Lustre client does not answer: lctl get_param version"; return 1; }
  at_boot || { echo "fsx: $table does not mount $folder at boot"; return 1; }
  echo "fsx: $source at $folder, Lustre $(lctl get_param -n version | grep -oE '[0-9]+(\.[0-9]+)+' | head -n 1)"
}

client() {
  if command -v apt-get > /dev/null; then
    # shellcheck disable=SC1091
    . /etc/os-release
    export DEBIAN_FRONTEND=noninteractive
    "$(dirname "$0")/key.sh" apply "$keys" "$key" /etc/apt/keyrings/fsx.gpg
    echo "deb [signed-by=/etc/apt/keyrings/fsx.gpg] $repository $VERSION_CODENAME main" > /etc/apt/sources.list.d/fsx.list
    apt-get update -qq
    apt-get install -y -qq -o DPkg::Lock::Timeout=300 lustre-client-utils "lustre-client-modules-$(uname -r)" > /dev/null 2>&1 && return
    apt-get install -y -qq -o DPkg::Lock::Timeout=300 lustre-client-modules-aws > /dev/null # brings a kernel that it has modules for
    echo "fsx: no Lustre modules for kernel $(uname -r); a kernel that has them is installed, and used from the next boot on"
    exit 3
  fi
  dnf install -y -q lustre-client
}

apply() {
  if ! command -v mount.lustre > /dev/null || ! modprobe lustre 2> /dev/null; then
    client
    modprobe lustre
  fi
  mkdir -p "$folder"
  cp -p "$table" "$table.new" # keeps its owner and mode
  { awk '/^#/ || $2 != ENVIRON["folder"] || $3 != "lustre"' "$table"; echo "$source $folder lustre $options 0 0"; } > "$table.new"
  mv "$table.new" "$table"
  mounted || mount "$folder"
}

case $verb in
  check | verify) verify ;;
  apply) verify > /dev/null 2>&1 || apply; verify ;;
  *) echo "$usage" >&2 && exit 2 ;;
esac
