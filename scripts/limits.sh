#!/usr/bin/env bash
# Sets unlimited locked memory (EFA registers its send buffers) and a high open-file limit, from the next login on.
# sshd needs `UsePAM yes`, because only PAM reads limits.d; sshd.sh keeps it on.
set -euo pipefail
usage="usage: limits.sh check|apply|verify OPEN_FILES"
verb=${1:?$usage} files=${2:?$usage}
[[ $files =~ ^[0-9]+$ ]] || { echo "$usage" >&2; exit 2; }
target=${TRAINFLEET_ROOT:-}/etc/security/limits.d/90-trainfleet.conf

wanted() { # `*` does not include root
  cat << CONF
# Written by trainfleet (scripts/limits.sh).
* - memlock unlimited
* - nofile $files
root - memlock unlimited
root - nofile $files
CONF
}

verify() { wanted | cmp -s - "$target" && echo "limits: locked memory unlimited, $files open files"; }

apply() {
  mkdir -p "${target%/*}"
  wanted > "$target.new"
  mv "$target.new" "$target"
}

case $verb in
  check | verify) verify || { echo "limits: $target is not as wanted"; exit 1; } ;;
  apply) verify > /dev/null || apply; verify ;;
  *) echo "$usage" >&2 && exit 2 ;;
esac
