#!/usr/bin/env bash
# The folder that all nodes share: made, and owned by the user who trains. shared_folder.sh apply /fsx/trainfleet ubuntu
set -euo pipefail
usage="usage: shared_folder.sh check|apply|verify FOLDER USER"
verb=${1:?$usage} folder=${2:?$usage} user=${3:?$usage}
[[ $folder =~ ^(/[A-Za-z0-9_][A-Za-z0-9._-]*)+$ && $user =~ ^[A-Za-z0-9_][A-Za-z0-9._@-]*$ ]] || { echo "$usage" >&2; exit 2; }

verify() {
  [ -d "$folder" ] || { echo "shared folder: $folder is not there"; return 1; }
  [ "$(stat -c %U "$folder")" = "$user" ] || { echo "shared folder: $folder belongs to $(stat -c %U "$folder"), not to $user"; return 1; }
  echo "shared folder: $folder, of $user"
}

apply() { # what is somebody's stays his: also root's, where root has begun a fleet in it
  local owner=root
  [ ! -d "$folder" ] || owner=$(stat -c %U "$folder")
  [ "$owner" = "$user" ] || { [ "$owner" = root ] && [ ! -e "$folder/code" ]; } ||
    { echo "shared folder: $folder is $owner's, and each user has one of his own: fleet.shared_folder: $folder-$user"; exit 1; }
  mkdir -p "$folder"
  chown "$user" "$folder"
}

case $verb in
  check | verify) verify ;;
  apply) verify > /dev/null || apply; verify ;;
  *) echo "$usage" >&2 && exit 2 ;;
esac
