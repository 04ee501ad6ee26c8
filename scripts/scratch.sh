#!/usr/bin/env bash
# Mounts the instance's NVMe disks as one fast local folder (RAID 0 if there are several). It is only for caches, because stopping the
# instance erases the disks. Refuses a disk with a file system, a partition or RAID metadata, because it may contain data.
set -euo pipefail
usage="usage: scratch.sh check|apply|verify FOLDER DISK..."
verb=${1:?$usage} folder=${2:?$usage}
shift 2
[ $# -gt 0 ] && [[ $folder =~ ^(/[A-Za-z0-9_][A-Za-z0-9._-]*)+$ && $* =~ ^(/dev/[A-Za-z0-9]+ ?)+$ ]] || { echo "$usage" >&2 && exit 2; }
export folder
label=trainfleet
mounts=${TRAINFLEET_MOUNTS:-/proc/mounts}
table=${TRAINFLEET_ROOT:-}/etc/fstab

verify() {
  awk '$2 == ENVIRON["folder"]' "$mounts" | grep -q . || { echo "scratch: nothing is mounted at $folder"; return 1; }
  echo "scratch: $folder, $(df -Ph "$folder" | awk 'NR == 2 {print $2}')"
}

apply() {
  local device=$1 disk
  if ! device=$(blkid -L "$label"); then
    for disk in "$@"; do
      [ -z "$(blkid -p -o value -s TYPE "$disk" 2> /dev/null)$(lsblk -nro NAME "$disk" | tail -n +2)" ] ||
        { echo "scratch: $disk is in use already, or holds data: wipefs $disk shows it"; exit 1; }
    done
    device=$1
    if [ $# -gt 1 ]; then
      command -v mdadm > /dev/null || { apt-get install -y -qq mdadm > /dev/null 2>&1 || dnf install -y -q mdadm; }
      device=/dev/md/$label
      mdadm --create "$device" --name="$label" --level=0 --raid-devices=$# --run --quiet "$@"
    fi
    mkfs.ext4 -q -L "$label" -E lazy_itable_init=1,nodiscard "$device"
  fi
  mkdir -p "$folder"
  cp -p "$table" "$table.new" # preserves owner and mode
  awk '/^#/ || $2 != ENVIRON["folder"]' "$table" > "$table.new"
  echo "LABEL=$label $folder ext4 noatime,nofail 0 0" >> "$table.new"
  mv "$table.new" "$table"
  mount "$folder"
  chmod 1777 "$folder"
}

case $verb in
  check | verify) verify ;;
  apply) verify > /dev/null || apply "$@"; verify ;;
  *) echo "$usage" >&2 && exit 2 ;;
esac
