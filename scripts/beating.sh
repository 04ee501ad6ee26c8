#!/usr/bin/env bash
# Health check for a container that runs a node's part of a job: its first process must be the entrypoint, and its ranks, once started,
# must have sent a recent heartbeat. Ranks that make no progress are left to health/watchdog.py. `apply` only checks.
set -euo pipefail
usage="usage: beating.sh check|apply|verify"
verb=${1:?$usage}
root=${TRAINFLEET_ROOT:-}
minutes=10

verify() {
  tr '\0' ' ' < "$root/proc/1/cmdline" | grep -q 'trainfleet\.node\.entrypoint' || { echo "beating: the first process is not a node's part of a job"; return 1; }
  local beats
  beats=$(compgen -G "$root/proc/1/cwd/runs/*/heartbeats/node-*" || true) # no match while the ranks start, or if the job has no ranks
  [ -n "$beats" ] || { echo "beating: no ranks yet"; return 0; }
  find "$root"/proc/1/cwd/runs/*/heartbeats/ -name 'node-*' -mmin "-$minutes" | grep -q . || { echo "beating: no beat for $minutes minutes"; return 1; }
  echo "beating: within $minutes minutes"
}

case $verb in
  check | verify | apply) verify ;;
  *) echo "$usage" >&2 && exit 2 ;;
esac
