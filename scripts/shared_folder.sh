#!/usr/bin/env bash
# Creates the folder that all nodes share, owned by the user who trains: shared_folder.sh apply /fsx/trainfleet ubuntu
# If FSx exports runs/ and data/ to S3, FSx has already created them and their parent folders, possibly owned by root.
set -euo pipefail
usage="usage: shared_folder.sh check|apply|verify FOLDER USER"
verb=${1:?$usage} folder=${2:?$usage} user=${3:?$usage}
[[ $folder =~ ^(/[A-Za-z0-9_][A-Za-z0-9._-]*)+$ && $user =~ ^[A-Za-z0-9_][A-Za-z0-9._@-]*$ ]] || { echo "$usage" >&2; exit 2; }

of_root() { [ "$user" = root ] || find "$folder/runs" "$folder/data" -maxdepth 0 -user root 2> /dev/null | paste -sd' ' -; }

verify() {
  [ -d "$folder" ] || { echo "shared folder: $folder is not there"; return 1; }
  [ "$(stat -c %U "$folder")" = "$user" ] || { echo "shared folder: $folder belongs to $(stat -c %U "$folder"), not to $user"; return 1; }
  [ -z "$(of_root)" ] || { echo "shared folder: $(of_root) belongs to root, not to $user"; return 1; }
  echo "shared folder: $folder, of $user"
}

apply() { # refuses another user's folder, including root's if it contains root's fleet
  local owner=root
  [ ! -d "$folder" ] || owner=$(stat -c %U "$folder")
  [ "$owner" = "$user" ] || { [ "$owner" = root ] && [ ! -e "$folder/code" ]; } ||
    { echo "shared folder: $folder belongs to $owner, but each user needs a separate one; set fleet.shared_folder: $folder-$user"; exit 1; }
  mkdir -p "$folder"
  # shellcheck disable=SC2046 # one word per folder; the names contain no spaces
  chown "$user" "$folder" $(of_root)
}

case $verb in
  check | verify) verify ;;
  apply) verify > /dev/null || apply; verify ;;
  *) echo "$usage" >&2 && exit 2 ;;
esac
