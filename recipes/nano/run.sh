#!/usr/bin/env bash
# The nano pipeline for several seeds, ours and the paper's recipe on the same base, text and heads, and one table of both.
#
#   recipes/nano/run.sh 0 1 2        # about 11 minutes of one core a seed; what is finished is not done again
#
# Runs: runs/nano-seed<N> (ours, with export and verify) and runs/nano-paper-seed<N>.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-.venv/bin/python}
export OMP_WAIT_POLICY=PASSIVE HF_HUB_OFFLINE=1

for seed in "${@:-0}"; do
    ours=runs/nano-seed$seed paper=runs/nano-paper-seed$seed
    shared=(tier=nano seed="$seed" resume=true logger.wandb=disabled)
    "$python" -m edge0_train phase=all root="$ours" "${shared[@]}"
    "$python" -m edge0_runtime verify "$ours/model"

    mkdir -p "$paper"
    for run in base quantize teacher_text head_distill; do # the recipes part after head_distill
        ln -sfn "../nano-seed$seed/$run" "$paper/$run"
    done
    for phase in student_sft on_policy evaluate; do
        "$python" -m edge0_train phase=$phase root="$paper" "${shared[@]}" experiment=paper
    done
done
"$python" -m recipes.nano.table runs
