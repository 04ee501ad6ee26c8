# shellcheck shell=dash
# Prints a node's facts for plans and the preflight as key=value lines: `sh -s -- [--links] SHARED_FOLDER PYTHON 'LOGGER...' PEER...`
# --links also prints the GPU topology, for which nvidia-smi needs a second.
# The script is read-only and needs no root, although it prints more with sudo. It is fast, so that 64 nodes take only a few seconds.
links=
[ "$1" != --links ] || { links=yes && shift; }
shared=$1 python=$2 loggers=$3
shift 3
say() { printf '%s=%s\n' "$1" "$2"; }
first() { IFS= read -r line < "$1" && say "$2" "$line"; } 2> /dev/null
echo '== facts'
say clock "$(date +%s.%N)"
. /etc/os-release
say os "$ID $VERSION_ID"
say kernel "$(uname -r)"
say machine "$(uname -m)"
hostname=$(uname -n)
say hostname "$hostname"
first /proc/sys/kernel/random/boot_id boot_id
say user "$(id -un)"
as_root=
if [ "$(id -u)" = 0 ]; then say root yes; elif sudo -n true 2> /dev/null; then say root yes && as_root='sudo -n'; else say root no; fi
say cores "$(nproc)"
while read -r key value _; do
  case $key in MemTotal:) say memory_kib "$value" ;; esac
done < /proc/meminfo
say memlock "$(ulimit -l)"
say nofile "$(ulimit -n)"
df -PkT / 2> /dev/null | while read -r device kind _ _ free _; do [ "$kind" = Type ] || say disk "$free $kind $device"; done
if [ -n "$shared" ]; then
  at=$shared # the nearest existing folder shows the file system
  until [ -d "$at" ] || [ "$at" = / ]; do at=${at%/*} at=${at:-/}; done
  timeout 10 df -PkT "$at" | while read -r device kind _ _ free _ mounted; do
    [ "$kind" = Type ] || say shared "$free $kind $device $mounted"
  done
  writable=writable # includes runs and data, which FSx may have created as root
  for path in "$shared" "$shared/runs" "$shared/data"; do [ ! -d "$path" ] || [ -w "$path" ] || writable=read-only; done
  [ ! -d "$shared" ] || say shared_folder "$writable"
  [ ! -d "$shared" ] || say owner "$(stat -c %U "$shared")"
  key=$shared/ssh/$(id -un).pub
  [ -O "$key" ] || key= # another user's key must not be authorized
  for path in "$shared"/env/*/.complete "$key"; do [ ! -e "$path" ] || say has "${path#"$shared"/}"; done
  [ ! -r "$key" ] || ! grep -qsFf "$key" ~/.ssh/authorized_keys || say authorized yes
fi
for path in /etc/ssh/sshd_config.d/10-trainfleet.conf /etc/security/limits.d/90-trainfleet.conf "/lib/modules/$(uname -r)/build"; do
  [ ! -e "$path" ] || say has "$path"
done
for program in gcc make curl tar git docker mount.lustre mdadm mkfs.xfs; do
  command -v "$program" > /dev/null || [ -x "/usr/sbin/$program" ] || [ -x "/sbin/$program" ] || say lacks "$program"
done

found= # a Python 3.11 or newer that can create environments; found by its files, because starting it takes longer than everything else
for minor in 13 12 11; do
  path=$(command -v "python3.$minor") || continue
  for lib in lib lib64; do [ ! -d "${path%/bin/*}/$lib/python3.$minor/ensurepip" ] || found=yes; done
done
[ -n "$found" ] || say lacks 'python 3.11 or newer'

for device in /sys/bus/pci/devices/*; do # counted on the bus, so that they are found before a driver is installed
  { read -r vendor < "$device/vendor" && read -r model < "$device/device" && read -r class < "$device/class"; } 2> /dev/null || continue
  case $vendor:$model:$class in
    0x10de:*:0x0302* | 0x10de:*:0x0300*) say bus nvidia ;;
    0x1002:*:0x0380* | 0x1002:*:0x1200*) say bus amd ;;
    0x1da3:*:0x1200*) say bus gaudi ;;
    0x1d0f:0xefa?:*) say bus efa ;;
    0x1d0f:0x7?6?:*) say bus neuron ;;
  esac
done
if command -v nvidia-smi > /dev/null; then
  timeout 10 nvidia-smi --format=csv,noheader,nounits \
    --query-gpu=driver_version,memory.total,ecc.errors.uncorrected.volatile.total,name | while IFS= read -r line; do say gpu "$line"; done
fi
if [ -n "$links" ] && command -v nvidia-smi > /dev/null; then
  timeout 20 nvidia-smi topo -m | tr '\t' ' ' | while IFS= read -r line; do say topology "$line"; done
  say mig "$(timeout 10 nvidia-smi -L | grep -c MIG)"
fi
for device in /dev/neuron[0-9]*; do [ ! -e "$device" ] || say neuron "$device"; done
if [ -d /sys/devices/virtual/neuron_device ]; then # found by name, because driver 2.31 moved the counters
  find /sys/devices/virtual/neuron_device -path '*_ecc_uncorrected/total' | while IFS= read -r path; do
    read -r count < "$path" && say neuron_ecc "${path#/sys/devices/virtual/neuron_device/} $count"
  done
fi
PATH=$PATH:/opt/aws/neuron/bin
if [ -e /dev/neuron0 ] && command -v neuron-ls > /dev/null; then
  timeout 20 neuron-ls --json-output 2>&1 | while IFS= read -r line; do say neuron_ls "$line"; done
fi
for device in /sys/class/infiniband/*; do
  [ -e "$device" ] || continue
  say infiniband "${device##*/}"
  driver=$(readlink -f "$device/device/driver")
  for port in "$device"/ports/*; do
    { read -r link < "$port/link_layer" && read -r rate < "$port/rate" && read -r state < "$port/state"; } 2> /dev/null || continue
    say port "${device##*/} ${port##*/} ${link%% *} ${state%% *} ${driver##*/} $rate"
  done
done
[ ! -d /sys/module/ib_uverbs ] || say uverbs yes
[ ! -r /opt/amazon/efa_installed_packages ] || first /opt/amazon/efa_installed_packages efa
[ ! -x /opt/amazon/efa/bin/fi_info ] ||
  say fi_info "$(timeout 10 /opt/amazon/efa/bin/fi_info -p efa -t FI_EP_RDM 2> /dev/null | grep -c 'provider: efa')"
if command -v dpkg-query > /dev/null; then
  dpkg-query -W -f '${db:Status-Status} ${Package} ${Version}\n' 'aws-neuronx-*' 'libnccl-ofi*' 'lustre-client*' 2> /dev/null |
    while read -r status package version; do [ "$status" != installed ] || say package "$package $version"; done
elif command -v rpm > /dev/null; then
  rpm -qa --qf '%{NAME} %{VERSION}\n' 'aws-neuronx-*' 'libnccl-ofi*' 'lustre-client*' |
    while IFS= read -r line; do say package "$line"; done
fi
[ ! -d /sys/module/kefalnd ] || say lnet "$($as_root timeout 10 lnetctl net show --net efa 2> /dev/null | grep -c 'status: up')"
for disk in /sys/block/nvme*; do
  { read -r model < "$disk/device/model"; } 2> /dev/null || continue
  case $model in *'Instance Storage'*) say scratch_disk "${disk##*/}" ;; esac
done
while read -r device folder kind _; do
  case $folder in /scratch | /fsx*) say mount "$folder $kind $device" ;; esac
done < /proc/mounts
for card in /sys/class/net/*; do
  { read -r mtu < "$card/mtu"; } 2> /dev/null && say mtu "${card##*/} $mtu"
  { read -r speed < "$card/speed"; } 2> /dev/null && say speed "${card##*/} $speed"
done
! command -v ip > /dev/null || ip -o addr | while read -r _ card _ address _; do say address "$card ${address%/*}"; done
[ "$#" = 0 ] || getent hosts "$hostname" "$@" | while read -r address names; do say resolves "$address $names"; done
if [ -x "$python" ]; then
  say python "$python"
  for record in "${python%/bin/*}"/lib/python3*/site-packages/torch-*.dist-info; do
    record=${record##*/torch-}
    [ "$record" = '*.dist-info' ] || say torch "${record%.dist-info}"
  done
fi
for path in ${loggers:+"$python" "$shared"/env/*/bin/python}; do # installed packages of train.loggers
  # shellcheck disable=SC2016,SC2086 # not shell variables; one word per service
  [ ! -x "$path" ] || timeout 20 "$path" -Pc 'import importlib.util, sys
for name in sys.argv[2:]: importlib.util.find_spec(name) and print(f"logger={name} {sys.argv[1]}")' "$path" $loggers
done
$as_root dmesg 2> /dev/null | grep -E 'NVRM: Xid|neuron.*(error|ECC)|Uncorrected|EXT4-fs error|LustreError' | tail -n 5 |
  while IFS= read -r line; do say kernel_says "$line"; done
echo '== end'
