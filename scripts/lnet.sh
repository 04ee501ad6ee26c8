#!/usr/bin/env bash
# Configures Lustre over EFA: LNet on TCP and on COUNT EFA devices, which it prefers, now and at every boot before the mount. Without this,
# the client silently uses TCP. https://docs.aws.amazon.com/fsx/latest/LustreGuide/configure-efa-clients.html
set -euo pipefail
usage="usage: lnet.sh check|apply|verify COUNT"
verb=${1:?$usage} count=${2:?$usage}
[[ $count =~ ^[1-9][0-9]?$ ]] || { echo "$usage" >&2; exit 2; }
root=${TRAINFLEET_ROOT:-} mounts=${TRAINFLEET_MOUNTS:-/proc/mounts}
own=$root/usr/local/sbin/trainfleet-lnet unit=$root/etc/systemd/system/trainfleet-lnet.service
off="fleet.fsx.efa: false makes a file system without it"

devices() { # EFA devices, which their driver distinguishes from other RDMA adapters
  local device
  for device in "$root"/sys/class/infiniband/*; do
    [ "$(basename "$(readlink -f "$device/device/driver")")" != efa ] || basename "$device"
  done
}
chosen() { devices | awk -v wanted="$count" '{ name[NR] = $0 } END { for (i = 0; i < wanted; i++) print name[1 + int(i * NR / wanted)] }'; } # spread evenly over the cards
up() { lnetctl net show --net efa 2> /dev/null | grep -c 'status: up' || true; } # grep fails if the count is 0, which is a valid result
card() { ip -o route show default | awk '{ for (i = 1; i < NF; i++) if ($i == "dev") { print $(i + 1); exit } }'; }

verify() {
  [ "$(up)" -ge "$count" ] || { echo "lnet: $(up) EFA interfaces of $count serve Lustre: lnetctl net show"; return 1; }
  if [ ! -x "$own" ] || [ ! -e "$unit" ]; then echo "lnet: EFA is not set up at boot: no $unit" && return 1; fi
  echo "lnet: $(up) EFA interfaces serve Lustre"
}

configure() {
  local device
  modinfo kefalnd > /dev/null 2>&1 || { echo "lnet: the Lustre client for kernel $(uname -r) has no module for EFA (kefalnd); $off"; exit 1; }
  [ "$(devices | wc -l)" -ge "$count" ] || { echo "lnet: $(devices | wc -l) EFA devices, $count wanted: ls /sys/class/infiniband; $off"; exit 1; }
  ! awk '$3 == "lustre"' "$mounts" | grep -q . || { echo "lnet: Lustre is mounted over TCP: umount -a -t lustre, then make setup"; exit 1; }
  [ ! -d "$root/sys/module/lnet" ] || lustre_rmmod # loaded modules would keep their initial networks
  modprobe lnet
  modprobe kefalnd "ipif_name=$(card)"
  modprobe ksocklnd
  lnetctl lnet configure
  lnetctl net del --net tcp 2> /dev/null || true # it may not exist
  lnetctl net add --net tcp --if "$(card)"
  for device in $(chosen); do lnetctl net add --net efa --if "$device" --peer-credits 32; done
  lnetctl set discovery 1
  lnetctl udsp add --src efa --priority 0
}

apply() {
  [ "$(up)" -ge "$count" ] || configure
  [ "$0" -ef "$own" ] && return # called by the systemd unit
  install -D -m 0755 "$0" "$own"
  install -d "${unit%/*}"
  printf '%s\n' '[Unit]' 'Description=LNet over EFA' Wants=network-online.target After=network-online.target '[Service]' Type=oneshot \
    RemainAfterExit=yes "ExecStart=$own apply $count" > "$unit" # the mount depends on it: x-systemd.requires (fsx.sh)
  systemctl daemon-reload
}

case $verb in
  check | verify) verify ;;
  apply) verify > /dev/null || apply; verify ;;
  *) echo "$usage" >&2 && exit 2 ;;
esac
