#!/usr/bin/env bash
# Downloads the signing key of a repository or file, checks it against FINGERPRINT (from docker/platforms.lock.yaml), and writes it to FILE.
set -euo pipefail
usage="usage: key.sh check|apply|verify URL FINGERPRINT FILE"
verb=${1:?$usage} url=${2:?$usage} wanted=${3:?$usage} file=${4:?$usage}

keys() { gpg --batch --with-colons --show-keys "$1" 2> /dev/null | awk -F: '$1 == "pub" { own = 1 } $1 == "fpr" && own { print $10; own = 0 }' | paste -sd, -; }

verify() {
  [ -s "$file" ] && [ "$(keys "$file")" = "$wanted" ] || { echo "key: $file is not the key $wanted"; return 1; }
  echo "key: $wanted"
}

apply() {
  folder=$(mktemp -d)
  trap 'rm -rf "$folder"' EXIT
  command -v gpg > /dev/null || { echo "key: no gpg on this node: apt-get install gnupg, or dnf install gnupg2"; exit 1; }
  curl -fsSL --retry 3 --max-filesize 1000000 -o "$folder/key" "$url" || { echo "key: can't download $url"; exit 1; }
  found=$(keys "$folder/key")
  [ "$found" = "$wanted" ] || {
    echo "key: $url has the key ${found:-of nobody}, not $wanted; nothing was installed. Has its owner announced another? Then write that into docker/platforms.lock.yaml"
    exit 1
  }
  install -d "$(dirname "$file")"
  [[ $file == *.asc ]] || ! grep -q 'BEGIN PGP' "$folder/key" || { gpg --batch --dearmor < "$folder/key" > "$folder/ring" && mv "$folder/ring" "$folder/key"; } # rpm needs .asc
  install -m 0644 "$folder/key" "$file"
}

case $verb in
  check | verify) verify ;;
  apply) verify > /dev/null || apply; verify ;;
  *) echo "$usage" >&2 && exit 2 ;;
esac
