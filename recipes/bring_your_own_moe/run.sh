#!/usr/bin/env bash
# From a transformers directory of a supported family to a verified model directory, on a tiny random model.
#
#   recipes/bring_your_own_moe/run.sh [family] [folder]        qwen3_moe | qwen3_next | olmoe | deepseek_v3 | glm4_moe
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-.venv/bin/python}
family=${1:-olmoe} out=${2:-runs/byo-${1:-olmoe}}
export OMP_WAIT_POLICY=PASSIVE HF_HUB_OFFLINE=1

# 1. A model to bring. Yours has a directory already.
"$python" -m recipes.bring_your_own_moe.tiny "$family" "$out/source"

# 2. A tier for it: look at it, edit it.
"$python" -m edge0_train inspect base="$out/source" out="$out/mine" name=own
cat "$out/mine/tier/own.yaml"

# 3. int4 base, teacher text, heads, LoRA, on-policy, export. The settings below the first line are those of a tiny random model:
#    it writes noise without an end, and only the next token itself tells what it will route to (token_aware).
"$python" -m edge0_train --config-dir "$out/mine" phase=all tier=own root="$out" teacher.directory="$out/source" text.prompts=tasks \
    "chain=[quantize,teacher_text,head_distill,student_sft,on_policy,export]" base.dtype=float32 base.device=cpu \
    tier.token_aware=true text.max_length=64 sample.prompts=96 sample.eval_prompts=16 sample.max_new_tokens=24 \
    sample.max_truncated=1 sample.max_repetitive=1 sample.max_growth=100 optim.steps=60 optim.rows=8 optim.micro_rows=8 \
    optim.lr=3e-3 on_policy.rounds=1 on_policy.top_k=32 export.trace_prompts=2 export.trace_tokens=24 logger.wandb=disabled

# 4. Served as trained?
"$python" -m edge0_runtime verify "$out/model"
