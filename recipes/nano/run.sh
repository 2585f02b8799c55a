#!/usr/bin/env bash
# The nano pipeline for several seeds, each with its own table (runs/nano-seed<N>/evaluate/done.json).
#
#   recipes/nano/run.sh 0 1 2
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-.venv/bin/python}
export OMP_WAIT_POLICY=PASSIVE HF_HUB_OFFLINE=1

for seed in "${@:-0}"; do
    root=runs/nano-seed$seed
    "$python" -m edge0_train phase=all tier=nano seed="$seed" root="$root" resume=true logger.wandb=disabled
    "$python" -m edge0_runtime verify "$root/model"
done
