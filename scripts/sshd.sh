#!/usr/bin/env bash
# Configures sshd to accept only keys, not passwords. PAM stays on: without it limits.d is not read, and EFA would get 64 KiB of locked memory.
# `sshd -t` validates the new configuration first, because a mistake would lock everyone out. Open connections stay open.
set -euo pipefail
usage="usage: sshd.sh check|apply|verify"
verb=${1:?$usage}
root=${TRAINFLEET_ROOT:-}
target=$root/etc/ssh/sshd_config.d/10-trainfleet.conf # sshd uses the first value that it reads, and 10- sorts early

wanted() {
  cat << 'CONF'
# Written by trainfleet (scripts/sshd.sh).
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitEmptyPasswords no
PermitRootLogin prohibit-password
MaxStartups 100:30:400
ClientAliveInterval 30
ClientAliveCountMax 4
CONF
}

verify() { wanted | cmp -s - "$target" && echo "sshd: keys only"; }

reload() {
  if [ -d /run/systemd/system ]; then
    systemctl reload ssh 2> /dev/null || systemctl reload sshd # named ssh on Ubuntu, sshd on Amazon Linux
  else
    echo "sshd: systemd does not run it here; it reads the new file when it starts next"
  fi
}

apply() {
  mkdir -p "${target%/*}"
  grep -qsE '^ *Include +.*sshd_config.d' "$root/etc/ssh/sshd_config" ||
    { echo "sshd: $root/etc/ssh/sshd_config does not include sshd_config.d/*.conf; add: Include /etc/ssh/sshd_config.d/*.conf"; exit 1; }
  wanted > "$target"
  local said
  if ! said=$(sshd -t -f "$root/etc/ssh/sshd_config" 2>&1); then
    rm "$target"
    echo "sshd: the new configuration is not valid, and was taken back: $said"
    exit 1
  fi
  [ -n "$root" ] || reload
}

case $verb in
  check | verify) verify || { echo "sshd: $target is not as wanted"; exit 1; } ;;
  apply) verify > /dev/null || apply; verify ;;
  *) echo "$usage" >&2 && exit 2 ;;
esac
