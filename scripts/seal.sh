#!/usr/bin/env bash
# For a machine image of this node: what must not be in one leaves the disk, and waits in memory until `undo`. That is host keys, the
# machine id, what begins with a dot in homes (users' keys, tokens, histories, logs of jobs), the dead man's hours, and fstab's Lustre.
# Each file is overwritten before it goes, as a snapshot has the blocks of deleted files too. Where nobody says undo, all comes back by
# itself. Nothing can hide what runs have written to this very disk: that is refused.
set -euo pipefail
usage="usage: seal.sh check|apply|verify|undo SHARED_FOLDER"
verb=${1:?$usage} shared=${2:?$usage} root=${TRAINFLEET_ROOT:-}
[[ $shared =~ ^(/[A-Za-z0-9_][A-Za-z0-9._-]*)+$ ]] || { echo "$usage" >&2; exit 2; }
kept=$root/run/trainfleet-sealed.tar own=$root/run/trainfleet-seal.sh # /run is memory
longest=${TRAINFLEET_SEALED:-600} # seconds until it comes back by itself
most=1024 # MiB

hidden() { # what leaves, a line each; what every new user gets (/etc/skel) stays
  { { find etc/ssh -maxdepth 1 -name 'ssh_host_*'; find var/lib/trainfleet -name begun; find root -maxdepth 1 -name '.*'
    find home -xdev -mindepth 2 -maxdepth 2 -name '.*'; } 2> /dev/null || true; } | # not all are everywhere
    while read -r path; do cmp -s "etc/skel/${path##*/}" "$path" || echo "$path"; done
}

private() { hidden | tr '\n' '\0' | xargs -0 -r -I{} find {} -xdev -type f -size +0; } # its files that say something

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
  # shellcheck disable=SC2016 # another bash's
  setsid bash -c 'for ((s = 0; s < $1; s++)); do [ -e "$2" ] || exit 0; sleep 1; done; exec bash "$3" undo "$4"' - \
    "$longest" "$kept" "$own" "$shared" < /dev/null > /dev/null 2>&1 &
  private | tr '\n' '\0' | xargs -0 -r shred -n 1 -u
  hidden | tr '\n' '\0' | xargs -0 -r rm -rf --one-file-system || true # what is mounted there stays
  [ ! -e etc/machine-id ] || : > etc/machine-id
  [ ! -e etc/fstab ] || sed -i -E '/^[^#[:space:]]+[[:space:]]+[^[:space:]]+[[:space:]]+lustre[[:space:]]/d' etc/fstab
  sync
}

verify() { [ -e "$kept" ] && [ -z "$(private)" ] && echo "seal: $(tar -tf "$kept" | wc -l) files wait in memory"; }
undo() { [ ! -e "$kept" ] || { tar -xpf "$kept" && rm -f "$kept" "$own" && echo "seal: open"; }; }

script=$(realpath "$0") && cd "$root/"
case $verb in
  check | verify) verify || { echo "seal: this node is not sealed"; exit 1; } ;;
  apply) apply; verify; exit ;; # this file itself is gone now
  undo) undo; exit ;;
  *) echo "$usage" >&2 && exit 2 ;;
esac
