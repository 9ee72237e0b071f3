#!/usr/bin/env bash
#SBATCH --job-name=bert_ds
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@600
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
# Trains the recipe NAME as a Slurm job that goes on until training is done, however many time limits it takes:
#
#   sbatch [options of sbatch] recipes/slurm.sh NAME [CHECKPOINT_PATH TENSORBOARD_LOGS_PATH VOCAB_FILE DATA_PATH] [flags]
#   sbatch --nodes 2 --time 4:00:00 recipes/slurm.sh 20b /ckpt/20b /runs/20b /data/vocab.txt /data/corpus_text_sentence
#
# Options win over the lines above. One task is one rank: srun tells each its place and where rank 0 is; MASTER_ADDR and
# MASTER_PORT are needed for nothing, and honoured. Tasks of a machine see all its GPUs (--gpus-per-node, not
# --gpus-per-task), so that NCCL uses NVLink.
#
# 600 seconds before the time limit Slurm sends SIGUSR1 to every rank: they save, end with code 75, and the job is put
# back into the queue. Give a model whose checkpoint takes longer more time: --signal=USR1@1800. A job that is preempted
# saves at SIGTERM, and Slurm requeues it by itself. Variables:
#   SRUN_FLAGS   more options of srun, such as --container-image=... --container-mounts=...
#   DRY_RUN=1    prints what the run would be and starts nothing
set -euo pipefail

readonly saved=75 killed=$((128 + 10)) # by SIGUSR1: 75, and 138 where it came before training had begun
if [[ $# -eq 0 || $1 == -* ]]; then
    echo "error: give the NAME of a recipe: sbatch recipes/slurm.sh NAME ..." >&2
    exit 2
fi
name=$1
shift

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
if [[ ! -f $here/launch.sh ]]; then
    # sbatch runs a copy of this file; the job's record names the original.
    here=$(dirname "$(scontrol show job "$SLURM_JOB_ID" | sed -n 's/^ *Command=\([^ ]*\).*/\1/p')")
fi
if [[ ! -f $here/$name.sh ]]; then
    echo "error: NAME=$name: there is no $here/$name.sh. Fix: name a recipe." >&2
    exit 2
fi
# srun does not take the job's --cpus-per-task over.
[[ -z ${SLURM_CPUS_PER_TASK:-} ]] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK

code=0
LAUNCHER=srun "$here/$name.sh" "$@" || code=$?
if [[ $code -eq $saved || $code -eq $killed ]]; then
    echo "stopped before the time limit; job $SLURM_JOB_ID goes back into the queue"
    scontrol requeue "$SLURM_JOB_ID" && exit 0
    echo "error: job $SLURM_JOB_ID: cannot be requeued. Fix: submit it again with the same words; it goes on." >&2
fi
exit "$code"
