#!/usr/bin/env bash
# Prepares this node for a machine image: moves files that an image must not contain from the disk to memory until `undo`. These are host
# keys, the machine id, dotfiles in homes (users' keys, tokens, histories, job logs), deadman.sh's start time, and Lustre's fstab entries.
# Each file is overwritten before deletion, because a snapshot also contains blocks of deleted files. Without `undo`, the files are restored
# after a timeout. Files of runs on the node's own disk can't be hidden, so the script refuses.
set -euo pipefail
usage="usage: seal.sh check|apply|verify|undo SHARED_FOLDER"
verb=${1:?$usage} shared=${2:?$usage} root=${TRAINFLEET_ROOT:-}
[[ $shared =~ ^(/[A-Za-z0-9_][A-Za-z0-9._-]*)+$ ]] || { echo "$usage" >&2; exit 2; }
kept=$root/run/trainfleet-sealed.tar own=$root/run/trainfleet-seal.sh # /run is in memory
longest=${TRAINFLEET_SEALED:-600} # seconds until the files are restored without `undo`
most=1024 # MiB

hidden() { # files to hide, one per line, except unmodified copies from /etc/skel
  { { find etc/ssh -maxdepth 1 -name 'ssh_host_*'; find var/lib/trainfleet -name begun; find root -maxdepth 1 -name '.*'
    find home -xdev -mindepth 2 -maxdepth 2 -name '.*'; } 2> /dev/null || true; } | # some may not exist
    while read -r path; do cmp -s "etc/skel/${path##*/}" "$path" || echo "$path"; done
}

private() { hidden | tr '\n' '\0' | xargs -0 -r -I{} find {} -xdev -type f -size +0; } # non-empty files to hide

refuse_runs() {
  for folder in "$shared/runs" "$shared/data"; do
    [ -d ".$folder" ] && [ "$(stat -c %d ".$folder")" = "$(stat -c %d .)" ] && [ -n "$(ls -A ".$folder")" ] || continue
    echo "seal: $folder is on this node's own disk, and an image would hold it: make image before the first make train"
    exit 1
  done
}

apply() {
  [ ! -e "$kept" ] || { echo "seal: an image of this node is being made already; it opens by itself within $longest s"; exit 1; }
  refuse_runs && umask 077
  local paths size
  paths=$(hidden; ls -d etc/machine-id etc/fstab 2> /dev/null || true) # either may be missing
  size=$(xargs -r -d '\n' du -cmsx <<< "$paths" | awk 'END { print $1 }')
  [ "$size" -le $most ] || { echo "seal: hidden folders in homes have $size MiB, and only $most can wait in memory: du -sm ~/.[a-z]*"; exit 1; }
  tar --one-file-system -cpf "$kept.new" -T - <<< "$paths"
  install -m 700 "$script" "$own"
  mv "$kept.new" "$kept"
  # shellcheck disable=SC2016 # variables of the inner bash
  setsid bash -c 'for ((s = 0; s < $1; s++)); do [ -e "$2" ] || exit 0; sleep 1; done; exec bash "$3" undo "$4"' - \
    "$longest" "$kept" "$own" "$shared" < /dev/null > /dev/null 2>&1 &
  private | tr '\n' '\0' | xargs -0 -r shred -n 1 -u
  hidden | tr '\n' '\0' | xargs -0 -r rm -rf --one-file-system || true # mounts inside are kept
  [ ! -e etc/machine-id ] || : > etc/machine-id
  [ ! -e etc/fstab ] || sed -i -E '/^[^#[:space:]]+[[:space:]]+[^[:space:]]+[[:space:]]+lustre[[:space:]]/d' etc/fstab
  sync
}

verify() { [ -e "$kept" ] && [ -z "$(private)" ] && echo "seal: $(tar -tf "$kept" | wc -l) files wait in memory"; }
undo() { [ ! -e "$kept" ] || { tar -xpf "$kept" && rm -f "$kept" "$own" && echo "seal: open"; }; }

script=$(realpath "$0") && cd "$root/"
case $verb in
  check | verify) verify || { echo "seal: this node is not sealed"; exit 1; } ;;
  apply) apply; verify; exit ;; # apply deleted this script
  undo) undo; exit ;;
  *) echo "$usage" >&2 && exit 2 ;;
esac
