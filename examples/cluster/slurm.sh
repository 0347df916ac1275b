#!/usr/bin/env bash
# A run over several nodes of a Slurm cluster, each with 8 GPUs.
#
#   sbatch examples/cluster/slurm.sh --config=configs/qwen3_0_6b.py \
#     --config.model.checkpoint=/shared/Qwen3-0.6B --workdir=/shared/runs/one \
#     --config.dataset.path=/shared/gsm8k/train.jsonl \
#     --config.weight_sync.transport='object_store(dtype="bfloat16")' \
#     --config.cluster.placement='split(learners=2, devices=8)' \
#     --config.cluster.num_engines=16 --config.cluster.num_workers=4
#
# Submit it from a checkout that all nodes see, with an environment in .venv. This file has
# run with stand-ins for sbatch and srun, and not on a Slurm cluster.
#SBATCH --job-name=jaxrl
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

cd "$SLURM_SUBMIT_DIR"
export PYTHON=${PYTHON:-$SLURM_SUBMIT_DIR/.venv/bin/python}
# Jobs that share a node get ports of their own, and only this job knows the token.
export RAY_PORT=$((20000 + SLURM_JOB_ID % 10000))
export RAY_AUTH_MODE=token
RAY_AUTH_TOKEN=$("$PYTHON" -c 'import secrets; print(secrets.token_hex(32))')
export RAY_AUTH_TOKEN

# The first name of a list such as node[07-10],node12.
HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export HEAD

# One task a node. The job ends with the run's status, a minute after it at the latest.
# srun starts them with the environment of this script.
srun --ntasks-per-node=1 --kill-on-bad-exit=1 --wait=60 bash -c '
  exec bash examples/cluster/host.sh "$SLURM_PROCID" "$SLURM_NNODES" "$HEAD" "$@"
' host "$@"
