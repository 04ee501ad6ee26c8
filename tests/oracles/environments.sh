#!/usr/bin/env bash
# Makes the environments of other people's programs that judge ours, where they are missing: environments.sh NAME...
set -euo pipefail
cd "$(dirname "$0")/../.."

make_venv() { # folder, requirements
  [ -d "$1" ] || { python3 -m venv "$1" && "$1/bin/pip" install -q -r "tests/$2"; } || { rm -rf "$1" && return 1; }
}

for name in "$@"; do
  case $name in
    pcluster) make_venv .venv-pcluster oracles/parallelcluster.txt ;; # ParallelCluster's own schema and validators
    loggers) make_venv .venv-loggers oracles/loggers.txt ;; # W&B, MLflow and Trackio read what was sent to them
    site) make_venv .venv-site oracles/site.txt ;; # MkDocs builds the site of docs/
    fuzz) make_venv .venv-fuzz fuzz/atheris.txt ;; # Atheris leads a search by coverage
    transformers4) # transformers 4.51 on the torch of .venv
      [ -d .venv-transformers4/transformers ] ||
        .venv/bin/python -m pip install -q --no-deps --target .venv-transformers4 -r tests/oracles/transformers4.txt ;;
    iam) # an evaluator of IAM that is not ours
      command -v npm > /dev/null || { echo "npm is not installed; apt-get install nodejs npm" >&2 && exit 1; }
      [ -d tests/oracles/iam/node_modules ] ||
        (cd tests/oracles/iam && npm ci --silent --ignore-scripts --no-audit --no-fund) ;;
    *) echo "usage: environments.sh pcluster|loggers|site|fuzz|transformers4|iam ..." >&2 && exit 2 ;;
  esac
done
