#!/bin/bash
# GRPO of a 4B model with slime; the sizes of the model come from a script of slime.
set -ex
export PYTHONBUFFERED=16
NODES=$(wc -l < hostfile)
source scripts/models/qwen3-4B.sh

CKPT_ARGS=(
   --hf-checkpoint /models/Qwen3-4B
   --ref-load /models/Qwen3-4B_torch_dist
   --save /runs/qwen3-4b/
   --save-interval 25
)

ROLLOUT_ARGS=(
   --prompt-data data/dapo-math-17k/train.jsonl
   --input-key prompt
   --label-key label
   --apply-chat-template
   --rollout-shuffle
   --rm-type deepscaler
   --num-rollout 2000
   --rollout-batch-size 64
   --n-samples-per-prompt 8
   --rollout-max-response-len 4096
   --rollout-temperature 0.8
   # two updates of 256 samples
   --global-batch-size 256
)

EVAL_ARGS=(
   --eval-interval 20
   --eval-prompt-data aime data/aime/test.jsonl math data/math500/test.jsonl
   --n-samples-per-eval-prompt 4
   --eval-max-response-len 8192
)

PERF_ARGS=(
   --tensor-model-parallel-size 2
   --sequence-parallel
   --pipeline-model-parallel-size 1
   --recompute-granularity full
   --recompute-method uniform
   --use-dynamic-batch-size
   --max-tokens-per-gpu 9216
)

GRPO_ARGS=(
   --advantage-estimator grpo
   --use-kl-loss
   --kl-loss-coef 0.001
   --kl-loss-type low_var_kl
   --entropy-coef 0.00
   --eps-clip 0.2
   --eps-clip-high 0.28
)

OPTIMIZER_ARGS=(--optimizer adam --lr 1e-6 --lr-decay-style constant --adam-beta1 0.9 --adam-beta2 0.98)
OPTIMIZER_ARGS+=(--min-lr 1e-7)

ray job submit --address="http://127.0.0.1:8265" \
   -- python3 train.py \
   --actor-num-nodes 8 \
   --actor-num-gpus-per-node 8 \
   --colocate \
   ${MODEL_ARGS[@]} \
   ${CKPT_ARGS[@]} \
   ${ROLLOUT_ARGS[@]} \
   ${EVAL_ARGS[@]} \
   ${PERF_ARGS[@]} \
   ${GRPO_ARGS[@]} \
   ${OPTIMIZER_ARGS[@]} \
   --rollout-num-gpus-per-engine 2 \
   --sglang-mem-fraction-static 0.7
pkill -9 sglang
