#!/usr/bin/env bats
# The scripts as nodes run them. Real: files, sshd -t, ssh-keygen, fi_info without an EFA device, a Python environment. Fakes on PATH
# stand for what a container can't have: Lustre, GPUs, Neuron, EFA, package managers. They log their words.

key=0123456789ABCDEF0123456789ABCDEF01234567

setup() {
  scripts=$BATS_TEST_DIRNAME/../../scripts
  root=$(mktemp -d)
  export HOME=$root/home TRAINFLEET_ROOT=$root TRAINFLEET_MOUNTS=$root/mounts EFA_HOME=$root/opt FAKE_LOG=$root/log
  mkdir -p "$HOME" "$root/etc/ssh" "$root/opt" "$root/fakes"
  : > "$FAKE_LOG"
  : > "$root/mounts"
  : > "$root/etc/fstab"
}

teardown() { rm -rf "$root"; }

fake() { # name, body: a program on PATH that writes its words down and then does the body
  printf '#!/usr/bin/env bash\necho "%s $*" >> "$FAKE_LOG"\n%s\n' "$1" "${2:-}" > "$root/fakes/$1"
  chmod +x "$root/fakes/$1"
  PATH=$root/fakes:$PATH
}

@test "every script refuses an unknown verb with its usage, and has all three verbs" {
  for script in "$scripts"/*.sh; do
    run "$script" frobnicate a b c d
    [ "$status" -eq 2 ] || { echo "$script: $status $output"; false; }
    [[ $output == *usage* ]]
    grep -q check "$script"
    grep -q apply "$script"
    grep -q verify "$script"
    [ "$(wc -l < "$script")" -lt 60 ]
  done
}

@test "limits: written once, verified, left alone the second time" {
  run "$scripts/limits.sh" check 65536
  [ "$status" -eq 1 ]
  run "$scripts/limits.sh" apply 65536
  [ "$status" -eq 0 ]
  [ "${lines[-1]}" = "limits: locked memory unlimited, 65536 open files" ]
  grep -qx '\* - memlock unlimited' "$root/etc/security/limits.d/90-trainfleet.conf"
  touch -d '2001-01-01' "$root/etc/security/limits.d/90-trainfleet.conf"
  "$scripts/limits.sh" apply 65536
  [ "$(stat -c %Y "$root/etc/security/limits.d/90-trainfleet.conf")" -lt 1000000000 ]
  run "$scripts/limits.sh" verify 4096
  [ "$status" -eq 1 ]
}

@test "sshd: hardened and tried; a configuration that is not valid is taken back" {
  ssh-keygen -q -t ed25519 -N '' -f "$root/key"
  printf 'Include %s/etc/ssh/sshd_config.d/*.conf\nHostKey %s/key\n' "$root" "$root" > "$root/etc/ssh/sshd_config"
  mkdir -p /run/sshd
  PATH=$PATH:/usr/sbin run "$scripts/sshd.sh" apply
  [ "$status" -eq 0 ]
  [ "${lines[-1]}" = "sshd: keys only" ]
  PATH=$PATH:/usr/sbin sshd -T -f "$root/etc/ssh/sshd_config" | grep -qx 'passwordauthentication no'
  rm "$root/etc/ssh/sshd_config.d/10-trainfleet.conf"
  fake sshd 'echo "bad configuration option"; exit 255'
  run "$scripts/sshd.sh" apply
  [ "$status" -eq 1 ]
  [[ $output == *"taken back: bad configuration option"* ]]
  [ ! -e "$root/etc/ssh/sshd_config.d/10-trainfleet.conf" ]
}

@test "sshd: a configuration that includes nothing is said, not ignored" {
  echo 'Port 22' > "$root/etc/ssh/sshd_config"
  run "$scripts/sshd.sh" apply
  [ "$status" -eq 1 ]
  [[ $output == *"does not include"* ]]
}

@test "head key and access: one key, one line, other keys kept, an older head's key gone" {
  mkdir -p "$HOME/.ssh"
  printf 'ssh-ed25519 AAAA somebody\nssh-ed25519 BBBB trainfleet head old' > "$HOME/.ssh/authorized_keys" # no newline at the end
  run "$scripts/head_key.sh" apply "$root/shared/ssh"
  [ "$status" -eq 0 ]
  [[ ${lines[-1]} == "head key: SHA256:"* ]]
  before=$(cat "$root/shared/ssh/$(id -un).pub")
  "$scripts/head_key.sh" apply "$root/shared/ssh"
  [ "$(cat "$root/shared/ssh/$(id -un).pub")" = "$before" ]
  "$scripts/access.sh" apply "$root/shared/ssh/$(id -un).pub"
  run "$scripts/access.sh" apply "$root/shared/ssh/$(id -un).pub"
  [ "$status" -eq 0 ]
  [ "$(wc -l < "$HOME/.ssh/authorized_keys")" -eq 2 ]
  grep -qx 'ssh-ed25519 AAAA somebody' "$HOME/.ssh/authorized_keys"
  [ "$(grep -c BBBB "$HOME/.ssh/authorized_keys" || true)" -eq 0 ]
  run "$scripts/access.sh" apply "$root/nowhere"
  [ "$status" -eq 1 ]
}

@test "efa: the real fi_info finds no EFA here, and that is an answer" {
  command -v fi_info > /dev/null || { [ "${REQUIRE_ALL:-}" != 1 ]; skip "apt-get install libfabric-bin"; }
  echo 'EFA installer version: 1.51.0' > "$root/opt/efa_installed_packages"
  fake lsmod 'echo "ib_uverbs 180224 1 efa"'
  run "$scripts/efa.sh" verify 1.51.0 "$key"
  [ "$status" -eq 1 ]
  [[ $output == *"fi_info -p efa lists no endpoint"* ]]
}

@test "efa: version, module and endpoints are each looked at" {
  run "$scripts/efa.sh" verify 1.51.0 "$key"
  [ "$status" -eq 1 ]
  [[ $output == *"wanted 1.51.0"* ]]
  echo 'EFA installer version: 1.51.0' > "$root/opt/efa_installed_packages"
  fake lsmod 'true'
  [ -d /sys/module/ib_uverbs ] || { run "$scripts/efa.sh" verify 1.51.0 "$key"; [[ $output == *"ib_uverbs is not loaded"* ]]; }
  fake lsmod 'echo "ib_uverbs 180224 1 efa"'
  fake fi_info 'printf "provider: efa\n    fabric: efa\nprovider: efa\n"'
  run "$scripts/efa.sh" apply 1.51.0 "$key"
  [ "$status" -eq 0 ]
  [ "$output" = "efa: 1.51.0, 2 endpoints" ]
  echo 'EFA installer version: 1.50.0' > "$root/opt/efa_installed_packages"
  run "$scripts/efa.sh" apply 1.51.0 "$key" 1.47.0
  [ "$output" = "efa: 1.50.0, 2 endpoints" ]
  run "$scripts/efa.sh" verify 1.51.0 "$key"
  [[ $output == *"installer 1.50.0, wanted 1.51.0 or newer"* ]]
}

@test "efa: a download that fails says from where" {
  fake lsmod 'echo "ib_uverbs 180224 1 efa"'
  fake curl 'exit 22'
  run "$scripts/efa.sh" apply 1.51.0 "$key"
  [ "$status" -eq 1 ]
  [[ $output == *"can't download https://efa-installer.amazonaws.com/aws-efa-installer-1.51.0.tar.gz"* ]]
}

fake_apt() { # the version of the driver and of the fabric manager in Ubuntu's archive; what is installed then works
  fake dpkg 'exit 1'
  fake modprobe ''
  fake systemctl ''
  fake apt-cache "case \$2 in *fabric*) echo '  Candidate: $2-0ubuntu0.24.04.1';; *) echo '  Candidate: $1-0ubuntu0.24.04.1';; esac"
  fake apt-get "[ \$1 != install ] || { printf '#!/bin/sh\necho $1\n' > $root/fakes/nvidia-smi; chmod +x $root/fakes/nvidia-smi
    printf '#!/bin/sh\necho Fabric Manager version is : $2\n' > $root/fakes/nv-fabricmanager; chmod +x $root/fakes/nv-fabricmanager; }"
}

@test "nvidia: what the machine image brings is taken when it is new enough, and not when it is too new" {
  fake nvidia-smi 'case $1 in -L) echo GPU; echo GPU;; *) echo 595.91.07; echo 595.91.07;; esac'
  run "$scripts/nvidia.sh" apply 580.65.06 - 580 open
  [ "$status" -eq 0 ]
  [ "$output" = "nvidia: driver 595.91.07 on 2 GPUs" ]
  run "$scripts/nvidia.sh" verify 560.28.03 581 580 proprietary
  [ "$status" -eq 1 ]
  [ "$output" = "nvidia: driver 595.91.07, wanted 560.28.03 or newer, before 581" ]
  run "$scripts/nvidia.sh" verify 580.65.06 - 580 open fabric
  [ "$status" -eq 1 ]
  [[ $output == *"fabric manager , wanted 595.91.07"* ]]
}

@test "nvidia: where there is no driver, Ubuntu's packages of one version, the fabric manager's too" {
  fake_apt 580.126.09 580.126.09
  run "$scripts/nvidia.sh" apply 580.65.06 - 580 open fabric
  [ "$status" -eq 0 ] || { echo "$output"; false; }
  [[ $output == "nvidia: driver 580.126.09 on "*"with its fabric manager" ]]
  grep -q 'apt-get install .*nvidia-headless-580-server-open nvidia-utils-580-server nvidia-fabricmanager-580' "$FAKE_LOG"
}

@test "nvidia: a driver and a fabric manager of two versions are never installed" {
  fake_apt 580.178.04 580.173.02
  run "$scripts/nvidia.sh" apply 580.65.06 - 580 open fabric
  [ "$status" -eq 1 ]
  [[ $output == *"nvidia-fabricmanager-580 580.173.02-0ubuntu0.24.04.1 beside a driver 580.178.04"*"fleet.aws.ami"* ]]
  ! grep -q 'apt-get install' "$FAKE_LOG"
}

@test "nvidia: an old driver of another source is not replaced" {
  fake_apt 580.126.09 580.126.09
  fake nvidia-smi 'echo 535.1'
  run "$scripts/nvidia.sh" apply 580.65.06 - 580 open
  [ "$status" -eq 1 ]
  [[ $output == *"driver 535.1 is not of Ubuntu's packages"* ]]
  ! grep -q apt-get "$FAKE_LOG"
}

sign() { # files, name: makes a key called so, and exports it to files/key.asc; its fingerprint
  export GNUPGHOME=$root/gpg-$2
  mkdir -p -m 700 "$GNUPGHOME" "$1"
  gpg --batch --quiet --passphrase '' --quick-generate-key "$2" ed25519 sign never 2> /dev/null
  gpg --batch --quiet --armor --export > "$1/key.asc"
  gpg --batch --with-colons --list-keys | awk -F: '$1 == "fpr" { print $10; exit }'
}

@test "key: only the key that the lock names is taken" {
  command -v gpg > /dev/null || { [ "${REQUIRE_ALL:-}" != 1 ]; skip "apt-get install gnupg"; }
  ours=$(sign "$root/ours" ours)
  sign "$root/theirs" theirs > /dev/null
  run "$scripts/key.sh" apply "file://$root/theirs/key.asc" "$ours" "$root/ring.gpg"
  [ "$status" -eq 1 ]
  [[ $output == *"not $ours; nothing was installed"* ]]
  [ ! -e "$root/ring.gpg" ]
  cat "$root/theirs/key.asc" >> "$root/ours/key.asc" # one more beside it
  run "$scripts/key.sh" apply "file://$root/ours/key.asc" "$ours" "$root/ring.gpg"
  [ "$status" -eq 1 ]
  GNUPGHOME=$root/gpg-ours gpg --batch --quiet --armor --export > "$root/ours/key.asc"
  for ring in ring.gpg ring.asc; do
    run "$scripts/key.sh" apply "file://$root/ours/key.asc" "$ours" "$root/$ring"
    [ "$status" -eq 0 ] || { echo "$output"; false; }
    [ "$output" = "key: $ours" ]
  done
}

@test "efa: an installer that the key did not sign is not run" {
  command -v gpgv > /dev/null || { [ "${REQUIRE_ALL:-}" != 1 ]; skip "apt-get install gpgv"; }
  ours=$(sign "$root/www" ours)
  mkdir "$root/aws-efa-installer"
  printf 'echo "$@" > %s/ran; echo "EFA installer version: 1.51.0" > %s/opt/efa_installed_packages\n' "$root" "$root" > "$root/aws-efa-installer/efa_installer.sh"
  chmod +x "$root/aws-efa-installer/efa_installer.sh"
  tar -czf "$root/www/efa.tar.gz" -C "$root" aws-efa-installer
  GNUPGHOME=$root/gpg-ours gpg --batch --quiet --detach-sign -o "$root/www/efa.tar.gz.sig" "$root/www/efa.tar.gz"
  fake curl 'for last; do :; done
case $last in *.key) from=key.asc;; *.sig) from=efa.tar.gz.sig;; *) from=efa.tar.gz;; esac
cp "'"$root"'/www/$from" "$(printf "%s\n" "$@" | grep -A 1 -x -- -o | tail -n 1)"'
  fake lsmod 'echo "ib_uverbs 180224 1 efa"'
  fake fi_info 'printf "provider: efa\n"'
  mkdir -p /etc/modules-load.d
  echo changed >> "$root/www/efa.tar.gz"
  run "$scripts/efa.sh" apply 1.51.0 "$ours"
  [ "$status" -eq 1 ]
  [[ $output == *"is not signed by $ours"* ]]
  [ ! -e "$root/ran" ]
  tar -czf "$root/www/efa.tar.gz" -C "$root" aws-efa-installer
  GNUPGHOME=$root/gpg-ours gpg --batch --yes --quiet --detach-sign -o "$root/www/efa.tar.gz.sig" "$root/www/efa.tar.gz"
  run "$scripts/efa.sh" apply 1.51.0 "$ours"
  [ "$status" -eq 0 ] || { echo "$output"; false; }
  [ "$(cat "$root/ran")" = -y ]
  rm -f /etc/modules-load.d/trainfleet-efa.conf "$root/opt/efa_installed_packages"
  fake lsmod ''
  TRAINFLEET_HOST=image run "$scripts/efa.sh" apply 1.51.0 "$ours" # in an image: no module, no device, no limits
  [ "$status" -eq 0 ] || { echo "$output"; false; }
  [[ $output == *"efa: 1.51.0" ]]
  [ "$(cat "$root/ran")" = "-y --skip-kmod --skip-limit-conf --no-verify" ]
  [ ! -e /etc/modules-load.d/trainfleet-efa.conf ]
}

@test "neuron: packages, versions without the distribution's tail, devices" {
  fake dpkg-query 'case ${@: -1} in aws-neuronx-dkms) echo -n 2.31.7.0-1~jammy;; *) exit 1;; esac'
  run "$scripts/neuron.sh" verify "$key" aws-neuronx-dkms=2.31.7.0 aws-neuronx-tools=2.33.38.0
  [ "$status" -eq 1 ]
  [ "$output" = "neuron: aws-neuronx-tools missing, wanted 2.33.38.0" ]
  run "$scripts/neuron.sh" verify "$key" aws-neuronx-dkms=2.31.7.0
  [ "$status" -eq 1 ]
  [[ $output == *"no /dev/neuron"* ]]
  TRAINFLEET_HOST=image run "$scripts/neuron.sh" apply "$key" aws-neuronx-dkms=2.31.7.0 # in an image no device is looked for
  [ "$status" -eq 0 ]
  [ "$output" = "neuron: 1 packages as pinned" ]
}

@test "beating: the first process, and its ranks' beats" {
  mkdir -p "$root/proc/1" "$root/home/runs/x/heartbeats"
  ln -s "$root/home" "$root/proc/1/cwd"
  printf 'sleep\0009' > "$root/proc/1/cmdline"
  run "$scripts/beating.sh" verify
  [ "$status" -eq 1 ]
  printf 'python\000-m\000trainfleet.node.entrypoint' > "$root/proc/1/cmdline"
  run "$scripts/beating.sh" verify
  [ "$status" -eq 0 ]
  [ "$output" = "beating: no ranks yet" ]
  touch -d '1 hour ago' "$root/home/runs/x/heartbeats/node-0"
  run "$scripts/beating.sh" verify
  [ "$status" -eq 1 ]
  [ "$output" = "beating: no beat for 10 minutes" ]
  touch "$root/home/runs/x/heartbeats/node-1"
  run "$scripts/beating.sh" verify
  [ "$status" -eq 0 ]
}

@test "ofi-nccl: too old, not known to the loader, right" {
  mkdir -p "$root/opt/ofi-nccl/lib/x86_64-linux-gnu" "$root/etc/ld.so.conf.d"
  run "$scripts/ofi_nccl.sh" verify 1.20.0 1.51.0 "$key"
  [ "$status" -eq 1 ]
  [[ $output == *"no libnccl-net"* ]]
  touch "$root/opt/ofi-nccl/lib/x86_64-linux-gnu/libnccl-net-ofi.so"
  fake dpkg-query 'echo 1.9.2-aws'
  run "$scripts/ofi_nccl.sh" verify 1.20.0 1.51.0 "$key"
  [ "$status" -eq 1 ]
  [[ $output == *"1.9.2, wanted 1.20.0 or newer"* ]]
  fake dpkg-query 'echo 1.21.1-1'
  fake ldconfig ''
  run "$scripts/ofi_nccl.sh" apply 1.20.0 1.51.0 "$key"
  [ "$status" -eq 0 ]
  [ "$output" = "ofi-nccl: 1.21.1" ]
}

@test "fsx: mounted once, kept in fstab once, and found again" {
  source=fs-1.fsx.us-east-1.amazonaws.com@tcp:/abcd
  fake mount.lustre ''
  fake modprobe ''
  fake lctl 'echo "lustre: 2.15.6"'
  fake mount "echo \"10.0.0.5@tcp:/abcd \$1 lustre rw 0 0\" >> $root/mounts"
  run "$scripts/fsx.sh" check "$source" "$root/fsx"
  [ "$status" -eq 1 ]
  run "$scripts/fsx.sh" apply "$source" "$root/fsx"
  [ "$status" -eq 0 ]
  [ "${lines[-1]}" = "fsx: $source at $root/fsx, Lustre 2.15.6" ]
  run "$scripts/fsx.sh" apply "$source" "$root/fsx"
  [ "$(grep -c lustre "$root/etc/fstab")" -eq 1 ]
  [ "$(grep -c '^mount ' "$FAKE_LOG")" -eq 1 ]
  run "$scripts/fsx.sh" verify fs-2.fsx.us-east-1.amazonaws.com@tcp:/other "$root/fsx"
  [ "$status" -eq 1 ]
  [[ $output == *"is not mounted"* ]]
}

@test "fsx: data that does not go over EFA is said" {
  source=fs-1.fsx.us-east-1.amazonaws.com@tcp:/abcd
  mkdir "$root/fsx"
  fake modprobe ''
  fake lctl 'echo "lustre: 2.15.6"'
  fake mount "echo \"10.0.0.5@tcp:/abcd \$1 lustre rw 0 0\" >> $root/mounts"
  fake dd "echo 9 >> $root/sent"
  fake lnetctl "echo '        send_count: 4'; echo '        send_count: 4'"
  run "$scripts/fsx.sh" apply "$source" "$root/fsx" efa
  [ "$status" -eq 1 ]
  [[ $output == *"16 MiB written to $root/fsx did not go over EFA"* ]]
  grep -q "x-systemd.automount,x-systemd.requires=trainfleet-lnet.service 0 0" "$root/etc/fstab"
  fake lnetctl "echo '        send_count: 4'; [ ! -e $root/sent ] || echo '        send_count: '\$((16 * \$(wc -l < $root/sent)))"
  run "$scripts/fsx.sh" apply "$source" "$root/fsx" efa
  [ "$status" -eq 0 ]
  [ "${lines[-1]}" = "fsx: $source at $root/fsx over EFA, Lustre 2.15.6" ]
  [ -z "$(ls -A "$root/fsx")" ]
}

kernels() { # RUNNING, then those that have a Lustre module: fake tools of a machine, with Ubuntu's archive and FSx's repository
  local running=$1
  shift
  echo "$running" > "$root/running"
  printf '%s\n' "$@" > "$root/offered"
  mkdir -p "$root/boot/grub"
  fake uname "case \$1 in -r) cat $root/running;; *) /usr/bin/uname \"\$@\";; esac"
  fake curl 'echo x > "${@: -2:1}"'
  fake gpg 'echo "pub:"; echo "fpr:::::::::'"$key"':"'
  fake apt-cache "case \$1 in
    search) sed 's/.*/lustre-client-modules-& - Lustre module/' $root/offered;;
    show) v=\${2#lustre-client-modules-}; v=\${v#linux-image-}; grep -qx \"\$v\" $root/offered;; esac"
  fake apt-get "[ \$1 != install ] || printf '%s\\n' \"\$@\" | sed -n 's/^lustre-client-modules-//p' > $root/module"
  fake mount.lustre ''
  fake modinfo "[ \"\$(cat $root/module 2> /dev/null)\" = \"\$(cat $root/running)\" ]"
  fake update-grub "echo \"menuentry 'Ubuntu, with Linux \$(cat $root/module)' {\" > $root/boot/grub/grub.cfg"
}

@test "lustre: a kernel that has a module is left as it is" {
  kernels 6.17.0-1017-aws 6.14.0-1018-aws 6.17.0-1017-aws 6.17.0-1019-aws
  run "$scripts/lustre.sh" apply "$key"
  [ "$status" -eq 0 ] || { echo "$output"; false; }
  [ "${lines[-1]}" = "lustre: client for kernel 6.17.0-1017-aws" ]
  [ ! -e "$root/etc/default/grub.d/99-trainfleet.cfg" ]
}

@test "lustre: where FSx has no module for the kernel, the newest that has one becomes GRUB's default, and is verified after the boot" {
  kernels 7.0.0-1012-aws 6.14.0-1018-aws 6.17.0-1019-aws 6.8.0-1033-aws
  run "$scripts/lustre.sh" apply "$key"
  [ "$status" -eq 3 ] || { echo "$output"; false; }
  [[ ${lines[-1]} == *"no module for kernel 7.0.0-1012-aws; kernel 6.17.0-1019-aws, which has one, is GRUB's default and boots next" ]]
  grep -qx 'GRUB_DEFAULT="Advanced options for Ubuntu>Ubuntu, with Linux 6.17.0-1019-aws"' "$root/etc/default/grub.d/99-trainfleet.cfg"
  grep -q 'apt-get install .*linux-image-6.17.0-1019-aws linux-headers-6.17.0-1019-aws' "$FAKE_LOG"
  run "$scripts/lustre.sh" apply "$key" # the same boot still: the same answer
  [ "$status" -eq 3 ]
  sed -i 's/boot .*/boot another/' "$root/etc/default/grub.d/99-trainfleet.cfg"
  run "$scripts/lustre.sh" apply "$key" # it booted, and GRUB did not do as told: no boot is asked for again
  [ "$status" -eq 1 ]
  [[ $output == *"kernel 7.0.0-1012-aws booted, and not the one that"*"fleet.aws.ami"* ]]
  echo 6.17.0-1019-aws > "$root/running"
  run "$scripts/lustre.sh" apply "$key"
  [ "$output" = "lustre: client for kernel 6.17.0-1019-aws" ]
}

@test "lustre: no kernel to be had, a menu without it, and a driver for this kernel alone are refused before anything boots" {
  kernels 7.0.0-1012-aws
  run "$scripts/lustre.sh" apply "$key"
  [ "$status" -eq 1 ]
  [[ $output == *"nor for one that this distribution offers"*"fleet.aws.ami"* ]]
  kernels 7.0.0-1012-aws 6.17.0-1019-aws
  mkdir -p "$root/sys/module/nvidia"
  fake dkms ''
  run "$scripts/lustre.sh" apply "$key"
  [ "$status" -eq 1 ]
  [[ $output == *"the NVIDIA driver of this image is built for that kernel alone"* ]]
  rmdir "$root/sys/module/nvidia"
  fake update-grub ': > '"$root/boot/grub/grub.cfg"
  run "$scripts/lustre.sh" apply "$key"
  [ "$status" -eq 1 ]
  [[ $output == *"GRUB's menu has no kernel 6.17.0-1019-aws"* ]]
}

rdma() { # NAME... : EFA devices, beside one of another maker
  local name
  mkdir -p "$root/drivers/efa" "$root/drivers/mlx5_core"
  for name in "$@" mlx5_0; do
    mkdir -p "$root/sys/class/infiniband/$name/device"
    ln -sfn "$root/drivers/$([ "$name" = mlx5_0 ] && echo mlx5_core || echo efa)" "$root/sys/class/infiniband/$name/device/driver"
  done
}

@test "lnet: TCP and EFA devices of all cards, preferred, before Lustre is mounted, and again at every boot" {
  rdma rdmap0 rdmap1 rdmap2 rdmap3
  fake modinfo ''
  fake modprobe ''
  fake systemctl ''
  fake ip 'echo "default via 10.0.0.1 dev ens32 proto dhcp"'
  fake lnetctl "case \"\$*\" in 'net show'*) [ ! -e $root/up ] || sed 's/.*/status: up/' $root/up;; 'net add --net efa'*) echo >> $root/up;; esac"
  run "$scripts/lnet.sh" apply 2
  [ "$status" -eq 0 ] || { echo "$output"; false; }
  [ "$output" = "lnet: 2 EFA interfaces serve Lustre" ]
  [ "$(grep -v 'net show' "$FAKE_LOG" | grep 'lnetctl\|modprobe')" = "modprobe lnet
modprobe kefalnd ipif_name=ens32
modprobe ksocklnd
lnetctl lnet configure
lnetctl net del --net tcp
lnetctl net add --net tcp --if ens32
lnetctl net add --net efa --if rdmap0 --peer-credits 32
lnetctl net add --net efa --if rdmap2 --peer-credits 32
lnetctl set discovery 1
lnetctl udsp add --src efa --priority 0" ]
  unit=$root/etc/systemd/system/trainfleet-lnet.service
  grep -qx "ExecStart=$root/usr/local/sbin/trainfleet-lnet apply 2" "$unit"
  rm "$root/up"
  run "$root/usr/local/sbin/trainfleet-lnet" apply 2 # the next boot
  [ "$status" -eq 0 ]
  [ "$(wc -l < "$root/up")" -eq 2 ]
}

@test "lnet: a client without EFA's module, too few devices and a file system that is mounted over TCP are said, and nothing is changed" {
  rdma rdmap0
  fake modprobe ''
  fake lnetctl ''
  fake modinfo 'exit 1'
  run "$scripts/lnet.sh" apply 1
  [ "$status" -eq 1 ]
  [[ $output == *"has no module for EFA (kefalnd); fleet.fsx.efa: false"* ]]
  fake modinfo ''
  run "$scripts/lnet.sh" apply 2
  [ "$status" -eq 1 ]
  [[ $output == *"1 EFA devices, 2 wanted"* ]]
  echo '10.0.0.5@tcp:/abcd /fsx lustre rw 0 0' > "$root/mounts"
  run "$scripts/lnet.sh" apply 1
  [ "$status" -eq 1 ]
  [[ $output == *"Lustre is mounted over TCP: umount"* ]]
  [ "$(grep -c modprobe "$FAKE_LOG" || true)" -eq 0 ]
}

@test "fsx: words that are no file system and no folder are refused, and are never code" {
  fake mount ''
  fake modprobe ''
  fake mount.lustre ''
  fake lctl 'echo 2.15.6'
  source=fs-1.fsx.us-east-1.amazonaws.com@tcp:/abcd
  for folder in '/fsx #d;e touch '"$root/evil"';#' '/fsx\n/etc' $'/fsx\nproc' '/fsx ext4' '/fsx/../etc' /fsx/. fsx '/fsx$(touch '"$root/evil"')' \
    '/fsx;id' '/#d' '/.*' '/fsx/' / '' '/fs\x20'; do
    run "$scripts/fsx.sh" apply "$source" "$folder"
    [ "$status" -ne 0 ]
    [[ $output == *usage* ]]
  done
  for other in 'x y' 'x@tcp:/a b' $'x@tcp:/a\nb' '.*@tcp:/a' 'x@tcp:/../a' 'LABEL=a' '-o@tcp:/a'; do
    run "$scripts/fsx.sh" apply "$other" "$root/fsx"
    [ "$status" -eq 2 ]
  done
  [ ! -e "$root/evil" ]
  [ ! -s "$root/etc/fstab" ]
  [ ! -s "$FAKE_LOG" ]
}

@test "fsx: only its own line of fstab is replaced" {
  fake mount ''
  fake modprobe ''
  fake mount.lustre ''
  fake lctl 'echo 2.15.6'
  source=fs-1.fsx.us-east-1.amazonaws.com@tcp:/abcd
  printf '%s\n' "# $root/fsx lustre is mounted below" "/dev/sda1 / ext4 defaults 0 1" "old@tcp:/x $root/fsx lustre defaults 0 0" \
    "/dev/sdb $root/fsx/scratch ext4 defaults 0 0" "/dev/sdc $root/fsx-2 lustre defaults 0 0" > "$root/etc/fstab"
  chmod 640 "$root/etc/fstab"
  run "$scripts/fsx.sh" apply "$source" "$root/fsx"
  [ "$(wc -l < "$root/etc/fstab")" -eq 5 ]
  [ "$(grep -c "^$source $root/fsx lustre" "$root/etc/fstab")" -eq 1 ]
  [ "$(grep -c '^old@tcp' "$root/etc/fstab" || true)" -eq 0 ]
  [ "$(stat -c %a "$root/etc/fstab")" = 640 ]
}

@test "scratch, limits, shared folder: no other words than theirs" {
  fake mount ''
  fake mkfs.ext4 ''
  for folder in '/scratch #d;e touch '"$root/evil"';#' '/../etc' $'/a\nb' scratch '/*' '$(id)'; do
    run "$scripts/scratch.sh" apply "$folder" /dev/nvme1n1
    [ "$status" -eq 2 ]
    run "$scripts/shared_folder.sh" apply "$folder" nobody
    [ "$status" -eq 2 ]
  done
  for disk in /dev/../etc/passwd '/dev/sda;id' /etc/passwd $'/dev/a\n/b'; do
    run "$scripts/scratch.sh" apply "$root/scratch" "$disk"
    [ "$status" -eq 2 ]
  done
  run "$scripts/limits.sh" apply $'1\n* - nproc 1'
  [ "$status" -eq 2 ]
  run "$scripts/shared_folder.sh" apply "$root/fsx" '-R root'
  [ "$status" -eq 2 ]
  [ ! -e "$root/evil" ]
  [ ! -s "$FAKE_LOG" ]
}

@test "scratch: a disk that holds data is left alone" {
  fake blkid 'case $1 in -L) exit 2;; *) echo ext4;; esac'
  fake lsblk 'echo nvme1n1'
  fake mkfs.ext4 ''
  run "$scripts/scratch.sh" apply "$root/scratch" /dev/nvme1n1
  [ "$status" -eq 1 ]
  [[ $output == *"holds data"* ]]
  [ "$(grep -c mkfs "$FAKE_LOG" || true)" -eq 0 ]
}

@test "docker: a daemon that does not answer is said" {
  fake docker 'exit 1'
  run "$scripts/docker.sh" verify
  [ "$status" -eq 1 ]
  [[ $output == *"does not answer"* ]]
}

@test "shared folder: made for its user" {
  run "$scripts/shared_folder.sh" apply "$root/fsx/trainfleet" nobody
  [ "$status" -eq 0 ]
  [ "$(stat -c %U "$root/fsx/trainfleet")" = nobody ]
  run "$scripts/shared_folder.sh" verify "$root/fsx/trainfleet" root
  [ "$status" -eq 1 ]
}

@test "shared folder: what FSx has made for the export to S3 becomes its user's, and what is somebody's stays his" {
  mkdir -p "$root/fsx/trainfleet/runs" "$root/fsx/trainfleet/data"
  chown daemon "$root/fsx/trainfleet/data"
  run "$scripts/shared_folder.sh" verify "$root/fsx/trainfleet" nobody
  [ "$status" -eq 1 ]
  run "$scripts/shared_folder.sh" apply "$root/fsx/trainfleet" nobody
  [ "$status" -eq 0 ] || { echo "$output"; false; }
  [ "$(stat -c %U "$root/fsx/trainfleet/runs" "$root/fsx/trainfleet/data" | paste -sd' ' -)" = "nobody daemon" ]
  chown root "$root/fsx/trainfleet/runs" # the top alone is the user's
  run "$scripts/shared_folder.sh" verify "$root/fsx/trainfleet" nobody
  [ "$output" = "shared folder: $root/fsx/trainfleet/runs belongs to root, not to nobody" ]
  chmod 711 "$root"
  run su -s /bin/sh nobody -c "sh '$scripts/../python/trainfleet/hosts/facts.sh' '$root/fsx/trainfleet' '' '' | grep ^shared_folder"
  [ "$output" = shared_folder=read-only ] || { echo "$output"; false; }
}

@test "python: a folder without its marker counts as not there" {
  mkdir -p "$root/env/bin"
  run "$scripts/python.sh" verify "$root/env" https://index.invalid - torch==2.13.0
  [ "$status" -eq 1 ]
  [[ $output == *"is not complete"* ]]
}

@test "python: built beside the lock, marked last, and left alone the second time" {
  fake uv 'for last; do :; done
[ "$1" = pip ] || { mkdir -p "$last/bin"; printf "#!/bin/sh\necho 2.13.0+cpu\n" > "$last/bin/python"; chmod +x "$last/bin/python"; }'
  run "$scripts/python.sh" apply "$root/env" https://index.invalid - torch==2.13.0
  [ "$status" -eq 0 ]
  [ "${lines[-1]}" = "python: $root/env, torch 2.13.0+cpu" ]
  calls=$(wc -l < "$FAKE_LOG")
  run "$scripts/python.sh" apply "$root/env" https://index.invalid - torch==2.13.0
  [ "$status" -eq 0 ]
  [ "$(wc -l < "$FAKE_LOG")" -eq "$calls" ]
}

@test "python: Neuron's packages come from Neuron's index alone, torch by its hash, and what has neither is refused" {
  fake uv 'for last; do :; done
[ "$1" = pip ] || { mkdir -p "$last/bin"; printf "#!/bin/sh\ncase \$1 in -c) echo 2.9.1+cpu;; *) echo \$LEFT;; esac\n" > "$last/bin/python"; chmod +x "$last/bin/python"; }'
  neuron=(https://index.invalid/cpu https://neuron.invalid torch==2.9.1)
  run "$scripts/python.sh" apply "$root/env" "${neuron[@]}" torch-neuronx==2.9
  [ "$status" -eq 1 ]
  [[ $output == *"has a SHA-256 of torch==2.9.1"* ]]
  LEFT=libneuronxla run "$scripts/python.sh" apply "$root/env" "${neuron[@]}" --hash=sha256:aa torch-neuronx==2.9
  [ "$status" -eq 1 ]
  [[ $output == *"libneuronxla is asked for, and pinned nowhere"* ]]
  : > "$FAKE_LOG"
  LEFT="" run "$scripts/python.sh" apply "$root/env" "${neuron[@]}" --hash=sha256:aa torch-neuronx==2.9
  [ "$status" -eq 0 ] || { echo "$output"; false; }
  grep -qx 'torch==2.9.1+cpu --hash=sha256:aa' "$root/env/torch.lock"
  grep -q -- '--no-deps --index-url https://neuron.invalid torch-neuronx==2.9$' "$FAKE_LOG"
  [ "$(grep -c neuron.invalid "$FAKE_LOG")" -eq 1 ]
  [ "$(grep -c extra-index-url "$FAKE_LOG" || true)" -eq 0 ]
  [ "$(grep -c require-hashes "$FAKE_LOG")" -eq 2 ]
}

@test "build tools: what is missing is named" {
  run "$scripts/build_tools.sh" verify
  [ "$status" -eq 0 ] || [[ $output == "build tools: missing: "* ]]
}

@test "venv: of two first makes neither removes what the other makes" {
  mkdir -p "$root/scripts"
  cp "$scripts/venv.sh" "$scripts/pip_sources.py" "$root/scripts"
  echo 'torch==2.13.0' > "$root/requirements.lock"
  fake uv 'case $1 in
venv) for last; do :; done; mkdir -p "$last"; sleep 1; mkdir "$last/bin" || echo GONE >> "$FAKE_LOG"
  printf "#!/bin/sh\n" > "$last/bin/python"; chmod +x "$last/bin/python" ;;
pip) for turn in 1 2 3 4; do sleep 0.3; [ -x .venv/bin/python ] || echo GONE >> "$FAKE_LOG"; done ;;
esac'
  (cd "$root" && scripts/venv.sh apply requirements.lock > "$root/first" 2>&1; echo "$?" >> "$root/first") &
  sleep 0.4
  run "$root/scripts/venv.sh" apply requirements.lock
  [ "$status" -eq 0 ]
  [[ $output == *"waiting for it"* ]]
  wait
  [ "$(tail -n 1 "$root/first")" = 0 ]
  [ "$(grep -c GONE "$FAKE_LOG" || true)" -eq 0 ]
  [ "$(grep -c '^uv venv' "$FAKE_LOG")" -eq 1 ]
  [ -e "$root/.venv/.stamp" ]
}

deadman() { # a node of our own: what it waits for, asks and shuts down is seen in the log
  mkdir -p "$root/proc" "$root/var/lib/trainfleet" "$root/run" "$root/etc/systemd/system"
  export TRAINFLEET_PROC=$root/proc TRAINFLEET_PATIENCE=0
  fake systemctl
  fake shutdown
  fake who
  fake pgrep 'exit 1'
}

@test "deadman: installed with its timer, and quiet while its hours last and something runs" {
  deadman
  run "$scripts/deadman.sh" apply 2 30
  [ "$status" -eq 0 ]
  grep -qx "ExecStart=$root/usr/local/sbin/trainfleet-deadman check 2 30" "$root/etc/systemd/system/trainfleet-deadman.service"
  grep -q 'systemctl enable --quiet --now trainfleet-deadman.timer' "$FAKE_LOG"
  run "$root/usr/local/sbin/trainfleet-deadman" check 2 30
  [ "$status" -eq 0 ]
  [ -z "$(grep shutdown "$FAKE_LOG")" ]
  mkdir "$root/proc/77"
  printf 'A=1\0TRAINFLEET_JOB=/fsx:mine\0' > "$root/proc/77/environ"
  touch -d '2 hours ago' "$root/run/trainfleet-busy"
  "$scripts/deadman.sh" check - 30 # a job is on it
  [ -z "$(grep shutdown "$FAKE_LOG")" ]
  [ "$(($(date +%s) - $(stat -c %Y "$root/run/trainfleet-busy")))" -lt 60 ]
}

@test "deadman: idle for too long, it stops; a login counts as work" {
  deadman
  touch -d '31 minutes ago' "$root/run/trainfleet-busy"
  fake who 'echo you'
  run "$scripts/deadman.sh" check - 30
  [ "$status" -eq 0 ]
  [ -z "$(grep shutdown "$FAKE_LOG")" ]
  touch -d '31 minutes ago' "$root/run/trainfleet-busy"
  fake who
  run "$scripts/deadman.sh" check - 30
  grep -q 'shutdown -h now trainfleet: nothing ran on it for 30 minutes' "$FAKE_LOG"
}

@test "deadman: its hours are over, so it asks the run to save before it stops" {
  deadman
  touch -d '91 minutes ago' "$root/var/lib/trainfleet/begun"
  bash -c 'trap "echo asked > \"$0/asked\"; exit" USR1; while :; do sleep 0.1; done' "$root" 3>&- & # bats waits for whoever has 3
  job=$!
  mkdir "$root/proc/$job"
  printf 'TRAINFLEET_JOB=/fsx:mine\0' > "$root/proc/$job/environ"
  printf 'python\0-m\0trainfleet.node.supervisor\0' > "$root/proc/$job/cmdline"
  run "$scripts/deadman.sh" check 1.5 -
  [ "$status" -eq 0 ]
  wait "$job" || true
  [ "$(cat "$root/asked")" = asked ]
  grep -q 'shutdown -h now trainfleet: its 1.5 hours are over' "$FAKE_LOG"
}

@test "seal: keys, tokens and histories leave the disk overwritten, and come back as they were" {
  mkdir -p "$root/run" "$root/root/.ssh" "$root/home/you/.ssh" "$root/home/you/.cache" "$root/home/you/mine" "$root/etc/skel" "$root/var/lib/trainfleet"
  echo host > "$root/etc/ssh/ssh_host_ed25519_key"; echo pub > "$root/etc/ssh/ssh_host_ed25519_key.pub"; echo conf > "$root/etc/ssh/sshd_config"
  echo key > "$root/home/you/.ssh/authorized_keys"; chmod 600 "$root/home/you/.ssh/authorized_keys"; echo token > "$root/home/you/.cache/token"
  echo same | tee "$root/etc/skel/.bashrc" > "$root/home/you/.bashrc"; echo 'export HF_TOKEN=x' > "$root/root/.bashrc"; echo word > "$root/home/you/mine/file"
  echo 0123 > "$root/etc/machine-id"; touch "$root/var/lib/trainfleet/begun"
  printf 'LABEL=root / ext4 defaults 0 1\nfs-1@tcp:/ab /fsx lustre noatime 0 0\n' > "$root/etc/fstab"
  ln "$root/home/you/.ssh/authorized_keys" "$root/block" # what stands in the file's blocks
  before=$(cd "$root" && find etc root home var -type f -exec sha256sum {} + | sort)
  run "$scripts/seal.sh" check /fsx/trainfleet
  [ "$status" -eq 1 ]
  run "$scripts/seal.sh" apply /fsx/trainfleet
  [ "$status" -eq 0 ] || { echo "$output"; false; }
  [[ ${lines[-1]} == "seal: "*" files wait in memory" ]]
  [ "$(cd "$root" && find etc root home var -type f | sort | paste -sd' ')" = \
    "etc/fstab etc/machine-id etc/skel/.bashrc etc/ssh/sshd_config home/you/.bashrc home/you/mine/file" ]
  [ ! -s "$root/etc/machine-id" ] && ! grep -q lustre "$root/etc/fstab" && grep -q LABEL=root "$root/etc/fstab"
  ! grep -q key "$root/block"
  [ "$(stat -c %a "$root/run/trainfleet-sealed.tar")" = 600 ]
  run "$scripts/seal.sh" apply /fsx/trainfleet
  [ "$status" -eq 1 ]
  [[ $output == *"is being made already"* ]]
  run bash "$root/run/trainfleet-seal.sh" undo /fsx/trainfleet
  [ "$output" = "seal: open" ]
  [ "$(cd "$root" && find etc root home var -type f -exec sha256sum {} + | sort)" = "$before" ]
  [ "$(stat -c %a "$root/home/you/.ssh/authorized_keys")" = 600 ] && [ ! -e "$root/run/trainfleet-sealed.tar" ]
}

@test "seal: it opens by itself, and what runs wrote to the disk is refused" {
  mkdir -p "$root/run" "$root/home/you" "$root/home/fleet/runs/a"
  echo key > "$root/home/you/.key"
  run "$scripts/seal.sh" apply /home/fleet
  [ "$status" -eq 1 ]
  [[ $output == *"/home/fleet/runs is on this node's own disk"* ]] && [ -e "$root/home/you/.key" ]
  TRAINFLEET_SEALED=1 "$scripts/seal.sh" apply /fsx/trainfleet || true # it may be open again by the time that it is verified
  for _ in $(seq 400); do [ ! -e "$root/home/you/.key" ] || break; sleep 0.1; done
  [ "$(cat "$root/home/you/.key")" = key ]
  run "$scripts/seal.sh" verify /fsx/trainfleet
  [ "$status" -eq 1 ]
}
