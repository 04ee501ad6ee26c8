#!/usr/bin/env bash
# Creates the key pair with which the head logs in to the nodes. Writes only the public key, named after the user, to the shared FOLDER.
set -euo pipefail
usage="usage: head_key.sh check|apply|verify FOLDER"
verb=${1:?$usage} folder=${2:?$usage}
key=$HOME/.ssh/id_trainfleet public=$folder/$(id -un).pub

verify() {
  [ -s "$key" ] || { echo "head key: no $key"; return 1; }
  cmp -s "$key.pub" "$public" || { echo "head key: $public is not the public half of $key"; return 1; }
  echo "head key: $(ssh-keygen -l -f "$key.pub" | cut -d' ' -f2)"
}

apply() {
  mkdir -p "$HOME/.ssh" "$folder"
  chmod 700 "$HOME/.ssh"
  [ -s "$key" ] || ssh-keygen -q -t ed25519 -N '' -C "trainfleet head $(uname -n)" -f "$key"
  cp "$key.pub" "$public.new"
  mv "$public.new" "$public"
}

case $verb in
  check | verify) verify ;;
  apply) verify > /dev/null || apply; verify ;;
  *) echo "$usage" >&2 && exit 2 ;;
esac
