#!/usr/bin/env bash
# Adds the key in FILE to this user's authorized keys, so that the head can log in to every node. Other keys are kept.
set -euo pipefail
usage="usage: access.sh check|apply|verify FILE"
verb=${1:?$usage} file=${2:?$usage}
target=$HOME/.ssh/authorized_keys

# For up to a minute, an NFS client may not see a file that another node has created. Listing the folder refreshes its cache.
look_again() {
  local folder
  folder=$(dirname "$1")
  [ "$folder" = / ] || look_again "$folder"
  ls "$folder" > /dev/null 2>&1 || true # a missing folder is reported below
}

verify() { grep -qsxFf "$file" "$target" && echo "access: the head's key is let in"; }

apply() {
  look_again "$file"
  [ -s "$file" ] || { echo "access: $file is not there; is the shared folder mounted?"; exit 1; }
  [ -O "$file" ] || { echo "access: $file belongs to $(stat -c %U "$file"), whose key is not let in as $(id -un)"; exit 1; }
  mkdir -p "$HOME/.ssh"
  chmod 700 "$HOME/.ssh"
  sed -i '/ trainfleet head /d' "$target" 2> /dev/null || true # removes an older head's key; the file may not exist yet
  [ ! -s "$target" ] || [ -z "$(tail -c 1 "$target")" ] || echo >> "$target"
  cat "$file" >> "$target"
  chmod 600 "$target"
}

case $verb in
  check | verify) verify || { echo "access: the head's key is not in $target"; exit 1; } ;;
  apply) verify > /dev/null || apply; verify ;;
  *) echo "$usage" >&2 && exit 2 ;;
esac
