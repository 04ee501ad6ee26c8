#!/usr/bin/env bash
# The engine's tests under other versions of torch: tests/versions.sh 2.9.1 2.11.0
#
# 2.9 is what Trn1's last SDK has, 2.11 what GPU images carry. Each version gets an environment in FOLDER (7 GB, kept), which sees this
# project's other packages; so .venv must have those of the tests (make test). Tests whose packages have no build for that torch, as
# torchao has none for 2.9, skip and say so. Logs are FOLDER/<version>.log; a version that fails does not keep the others from running.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${FOLDER:-/tmp/torch-versions}
tests=(
  tests/unit/test_engine_*.py tests/unit/test_devices.py tests/unit/test_rounding.py tests/unit/test_layout_choice.py tests/unit/test_memory.py
  tests/unit/test_models_*.py tests/unit/test_fp8.py
  tests/distributed/test_training.py tests/distributed/test_layouts.py tests/distributed/test_economies.py tests/distributed/test_guard.py
  tests/distributed/test_half_weights.py tests/distributed/test_resume_exactly.py tests/distributed/test_checkpoint_layouts.py
)
[ $# -gt 0 ] || { echo "usage: $0 VERSION..." >&2; exit 2; }
failed=()
for version in "$@"; do
  environment=$folder/$version
  if [ ! -e "$environment/ready" ]; then
    python3 -m venv --clear "$environment"
    "$environment/bin/python" -m pip install -q --no-cache-dir "torch==$version"
    touch "$environment/ready"
  fi
  site=$("$environment/bin/python" -c 'import site; print(site.getsitepackages()[0])')
  .venv/bin/python -c 'import site; print(site.getsitepackages()[0])' > "$site/zz-trainfleet.pth" # searched last: its torch is not taken
  found=$("$environment/bin/python" -c 'import torch; print(torch.__version__.partition("+")[0])')
  [ "$found" = "$version" ] || { echo "$environment has torch $found and not $version; remove it" >&2; exit 1; }
  "$environment/bin/python" -m pytest -q -p no:cacheprovider "${tests[@]}" 2>&1 | tee "$folder/$version.log" || failed+=("$version")
done
[ ${#failed[@]} -eq 0 ] || { echo "failed: ${failed[*]}; see $folder" >&2; exit 1; }
