#!/bin/sh
# One node of the lab (see lab.py), as process 1 of its own process, mount, network and host-name world: a disk of its own over this
# machine's, an empty home, its own host key and address, the folder that all share (shared.py), and sshd.
# Usage: node.sh FOLDER NAME ADDRESS [KEPT_PATH...] < /dev/fuse
set -eu
folder=$1 name=$2 address=$3
shift 3
root=$folder/root
mount -t overlay overlay -o "lowerdir=$folder/../base:/,upperdir=$folder/upper,workdir=$folder/work" "$root"
mount -t proc proc "$root/proc"
mount --bind "$folder/boot_id" "$root/proc/sys/kernel/random/boot_id"
mount -t sysfs sysfs "$root/sys"
mount -t tmpfs -o mode=755 tmpfs "$root/dev" # not this machine's: no disk of it can be reached from a node
for device in null zero full random urandom tty; do
  : > "$root/dev/$device"
  mount --bind "/dev/$device" "$root/dev/$device"
done
mkdir "$root/dev/pts" "$root/dev/shm"
mount -t devpts -o newinstance,ptmxmode=0666 devpts "$root/dev/pts"
ln -s pts/ptmx "$root/dev/ptmx"
ln -s /proc/self/fd "$root/dev/fd"
mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
mount -t tmpfs -o mode=1777 tmpfs "$root/run"
mkdir -p "$root/run/sshd" "$root/fsx"
mount --bind "$folder/home" "$root/root"
mount -i -t fuse -o fd=0,rootmode=40755,user_id=0,group_id=0,allow_other,default_permissions fsx "$root/fsx"
for kept in "$@"; do # the interpreter and this checkout, if they are in the home that is hidden now
  mkdir -p "$root$kept"
  mount --rbind "$kept" "$root$kept"
done
hostname "$name"
ip link set lo up
until ip link set eth0 up 2> /dev/null; do sleep 0.02; done
ip addr add "$address/16" dev eth0
ip route add 169.254.169.254 dev eth0 # where an instance's metadata service is, if a test plays it
exec chroot "$root" /usr/sbin/sshd -D -f /etc/ssh/lab_config -E /var/log/sshd.log < /dev/null
