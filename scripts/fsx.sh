#!/usr/bin/env bash
# Mounts an FSx file system now and at every boot: fsx.sh apply fs-0123.fsx.us-east-1.amazonaws.com@tcp:/abcd /fsx
# With `efa`, data must use EFA (lnet.sh). LNet's counters verify that, because a misconfigured client silently uses TCP.
# Data linked to S3 appears as files, which are loaded when read. lustre.sh installs the client.
set -euo pipefail
usage="usage: fsx.sh check|apply|verify DNS_NAME@tcp:/MOUNT_NAME FOLDER [efa]"
verb=${1:?$usage}
export source=${2:?$usage} folder=${3:?$usage} efa=${4:-} # source and folder become fields of fstab, so no part of the folder may be `..`
[[ $folder =~ ^(/[A-Za-z0-9_][A-Za-z0-9._-]*)+$ && $source =~ ^[A-Za-z0-9][A-Za-z0-9.-]*@tcp[0-9]*:/[A-Za-z0-9_-]+$ && $efa =~ ^(efa)?$ ]] ||
  { echo "$usage" >&2; exit 2; }
table=${TRAINFLEET_ROOT:-}/etc/fstab
mounts=${TRAINFLEET_MOUNTS:-/proc/mounts}
export options=noatime,flock,_netdev,x-systemd.automount${efa:+,x-systemd.requires=trainfleet-lnet.service} # flock: checkpoints and git use file locks
PROBE_MIB=16

mounted() { name=":/${source##*:/}" awk '$2 == ENVIRON["folder"] && $3 == "lustre" && index($1, ENVIRON["name"])' "$mounts" | grep -q .; }
at_boot() { awk '$1 == ENVIRON["source"] && $2 == ENVIRON["folder"] && $3 == "lustre" && $4 == ENVIRON["options"]' "$table" | grep -q .; }
sent() { lnetctl net show -v --net efa 2> /dev/null | awk '/send_count/ { all += $2 } END { print all + 0 }'; }

goes_over_efa() { # at least one request per MiB, as in AWS's own check
  local before file
  before=$(sent)
  file=$(mktemp -p "$folder" .trainfleet-efa-XXXXXX)
  dd if=/dev/zero of="$file" bs=1M count=$PROBE_MIB oflag=direct status=none || { rm -f "$file"; return 1; }
  rm -f "$file"
  [ $(($(sent) - before)) -ge $PROBE_MIB ]
}

verify() {
  mounted || { echo "fsx: $source is not mounted at $folder"; return 1; }
  lctl get_param -n version > /dev/null || { echo "fsx: the Lustre client does not answer: lctl get_param version"; return 1; }
  at_boot || { echo "fsx: $table does not mount $folder at boot"; return 1; }
  [ -z "$efa" ] || goes_over_efa || { echo "fsx: $PROBE_MIB MiB written to $folder did not go over EFA: lnetctl net show -v --net efa"; return 1; }
  echo "fsx: $source at $folder${efa:+ over EFA}, Lustre $(lctl get_param -n version | grep -oE '[0-9]+(\.[0-9]+)+' | head -n 1)"
}

apply() {
  modprobe lustre
  mkdir -p "$folder"
  cp -p "$table" "$table.new" # preserves owner and mode
  { awk '/^#/ || $2 != ENVIRON["folder"] || $3 != "lustre"' "$table"; echo "$source $folder lustre $options 0 0"; } > "$table.new"
  mv "$table.new" "$table"
  mounted || mount "$folder"
}

case $verb in
  check | verify) verify ;;
  apply) verify > /dev/null 2>&1 || apply; verify ;;
  *) echo "$usage" >&2 && exit 2 ;;
esac
