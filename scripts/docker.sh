#!/usr/bin/env bash
# Installs the distribution's Docker; with `nvidia`, also NVIDIA's container toolkit, so that containers can use the GPUs.
set -euo pipefail
usage="usage: docker.sh check|apply|verify [nvidia KEY]"
verb=${1:?$usage}
gpus=${2:-} key=${3:-}
toolkit=https://nvidia.github.io/libnvidia-container

verify() {
  docker info > /dev/null 2>&1 || { echo "docker: the daemon does not answer: systemctl status docker"; return 1; }
  [ -z "$gpus" ] || docker info 2> /dev/null | grep -q 'Runtimes:.*nvidia' || { echo "docker: no nvidia runtime"; return 1; }
  echo "docker: $(docker version --format '{{.Server.Version}}')${gpus:+ with the nvidia runtime}"
}

add_toolkit() {
  if command -v apt-get > /dev/null; then
    "$(dirname "$0")/key.sh" apply "$toolkit/gpgkey" "$key" /etc/apt/keyrings/nvidia-container-toolkit.gpg
    echo "deb [signed-by=/etc/apt/keyrings/nvidia-container-toolkit.gpg] $toolkit/stable/deb/\$(ARCH) /" \
      > /etc/apt/sources.list.d/nvidia-container-toolkit.list
    apt-get update -qq
    apt-get install -y -qq -o DPkg::Lock::Timeout=300 nvidia-container-toolkit > /dev/null
  else
    "$(dirname "$0")/key.sh" apply "$toolkit/gpgkey" "$key" /etc/pki/rpm-gpg/nvidia-container-toolkit.asc
    # shellcheck disable=SC2016  # dnf expands $basearch
    printf '[nvidia-container-toolkit]\nname=NVIDIA\nbaseurl=%s/stable/rpm/$basearch\nenabled=1\ngpgcheck=0\nrepo_gpgcheck=1\ngpgkey=file://%s\n' \
      "$toolkit" /etc/pki/rpm-gpg/nvidia-container-toolkit.asc > /etc/yum.repos.d/nvidia-container-toolkit.repo
    dnf install -y -q nvidia-container-toolkit
  fi
  nvidia-ctk runtime configure --runtime=docker > /dev/null
}

apply() {
  if ! command -v docker > /dev/null; then
    if command -v apt-get > /dev/null; then
      export DEBIAN_FRONTEND=noninteractive
      apt-get update -qq
      apt-get install -y -qq -o DPkg::Lock::Timeout=300 docker.io > /dev/null
    else
      dnf install -y -q docker
    fi
  fi
  [ -z "$gpus" ] || command -v nvidia-ctk > /dev/null || add_toolkit
  [ -z "${SUDO_USER:-}" ] || usermod -aG docker "$SUDO_USER" # takes effect at the next login
  systemctl enable --quiet docker
  systemctl restart docker
}

case $verb in
  check | verify) verify ;;
  apply) verify > /dev/null || apply; verify ;;
  *) echo "$usage" >&2 && exit 2 ;;
esac
