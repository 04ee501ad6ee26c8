#!/usr/bin/env bash
# Dead man's switch of a cloud node, installed by user data. It saves running jobs and shuts the node down after HOURS, or after MINUTES
# without a job or a login. `-` means never. Each `apply` restarts the count of HOURS.
# A timer runs `check` every minute. `verify` tests whether the timer is active.
set -euo pipefail
usage="usage: deadman.sh check|apply|verify HOURS|- MINUTES|-"
verb=${1:?$usage} hours=${2:?$usage} minutes=${3:?$usage}
[[ $hours =~ ^([0-9]+(\.[0-9]+)?|-)$ && $minutes =~ ^([0-9]+|-)$ ]] || { echo "$usage" >&2; exit 2; }
root=${TRAINFLEET_ROOT:-} proc=${TRAINFLEET_PROC:-/proc}
begun=$root/var/lib/trainfleet/begun busy=$root/run/trainfleet-busy
program=$root/usr/local/sbin/trainfleet-deadman units=$root/etc/systemd/system
patience=${TRAINFLEET_PATIENCE:-600} # seconds for a run to finish its step and save a checkpoint

jobs() { # finds the processes of runs by an environment variable, because their parent may have exited
  grep -lsz '^TRAINFLEET_JOB=' "$proc"/[0-9]*/environ | sed 's|/environ$||; s|.*/||' || true # grep fails without a match
}

age() { echo $(($(date +%s) - $(stat -c %Y "$1"))); }

stop() {
  echo "deadman: $1: this node saves and stops" | tee "$root/run/trainfleet-deadman"
  for process in $(jobs); do # on SIGUSR1, a supervisor stops its run with a checkpoint
    tr '\0' ' ' < "$proc/$process/cmdline" | grep -q 'trainfleet\.node\.supervisor' && kill -USR1 "$process" || true # it may have exited
  done
  for ((second = 0; second < patience; second++)); do
    [ -n "$(jobs)" ] || break
    sleep 1
  done
  sync
  shutdown -h now "trainfleet: $1"
}

check() {
  if [ "$hours" != - ] && [ "$(age "$begun")" -ge "$(awk -v hours="$hours" 'BEGIN { printf "%d", hours * 3600 }')" ]; then
    stop "its $hours hours are over (fleet.max_lifetime_hours)"
    return
  fi
  [ "$minutes" != - ] || return 0
  if [ ! -e "$busy" ] || [ -n "$(jobs)" ] || who | grep -q . || pgrep -f '^sshd: .*@' > /dev/null; then
    touch "$busy"
  elif [ "$(age "$busy")" -ge $((minutes * 60)) ]; then
    stop "nothing ran on it for $minutes minutes (fleet.idle_minutes)"
  fi
}

apply() {
  mkdir -p "${begun%/*}" "${program%/*}" "$units" "${busy%/*}"
  install -m 755 "$0" "$program"
  touch "$begun" "$busy"
  printf '[Service]\nType=oneshot\nExecStart=%s check %s %s\n' "$program" "$hours" "$minutes" > "$units/trainfleet-deadman.service"
  printf '[Timer]\nOnActiveSec=60\nOnUnitInactiveSec=60\n[Install]\nWantedBy=timers.target\n' > "$units/trainfleet-deadman.timer"
  systemctl daemon-reload
  systemctl enable --quiet --now trainfleet-deadman.timer
}

case $verb in check | apply) "$verb" ;; verify) systemctl is-active --quiet trainfleet-deadman.timer ;; *) echo "$usage" >&2 && exit 2 ;; esac
