#!/usr/bin/env bash
# The health of a container that carries a node's part of a job: its first process is ours, and its ranks, once there are any, have
# left a beat lately. What to do about ranks that don't get on is not this script's to say (health/watchdog.py); there is nothing to apply.
set -euo pipefail
usage="usage: beating.sh check|apply|verify"
verb=${1:?$usage}
root=${TRAINFLEET_ROOT:-}
minutes=10

verify() {
  tr '\0' ' ' < "$root/proc/1/cmdline" | grep -q 'trainfleet\.entrypoint' || { echo "beating: the first process is not a node's part of a job"; return 1; }
  local beats
  beats=$(compgen -G "$root/proc/1/cwd/runs/*/heartbeats/node-*" || true) # none yet: ranks are starting, or the job has none
  [ -n "$beats" ] || { echo "beating: no ranks yet"; return 0; }
  find "$root"/proc/1/cwd/runs/*/heartbeats/ -name 'node-*' -mmin "-$minutes" | grep -q . || { echo "beating: no beat for $minutes minutes"; return 1; }
  echo "beating: within $minutes minutes"
}

case $verb in
  check | verify | apply) verify ;;
  *) echo "$usage" >&2 && exit 2 ;;
esac
