#!/usr/bin/env bash
# Locked memory without limit (EFA registers what it sends from) and many open files, for every later login.
# Needs `UsePAM yes` in sshd: without PAM nothing reads limits.d, which is why sshd.sh leaves it on.
set -euo pipefail
usage="usage: limits.sh check|apply|verify OPEN_FILES"
verb=${1:?$usage} files=${2:?$usage}
[[ $files =~ ^[0-9]+$ ]] || { echo "$usage" >&2; exit 2; }
target=${TRAINFLEET_ROOT:-}/etc/security/limits.d/90-trainfleet.conf

wanted() { # `*` does not stand for root
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
