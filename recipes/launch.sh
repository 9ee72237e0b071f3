#!/usr/bin/env bash
# Launches the recipe named by the first argument; recipes/NAME.sh calls it. Works from any folder.
#
#   recipes/NAME.sh [CHECKPOINT_PATH TENSORBOARD_LOGS_PATH VOCAB_FILE DATA_PATH] [flags of pretrain.py]
#
# The four paths stand together or not at all (then the recipe's own are used). Variables, as in Megatron-LM's script:
#   GPUS_PER_NODE (8)  NUM_NODES (1)  NODE_RANK (0)  MASTER_ADDR (localhost)  MASTER_PORT (6000)
# LAUNCHER=srun starts a rank for each task of the Slurm job around it, see slurm.sh; the five are not needed then.
# DRY_RUN=1 prints what the run would be on that many ranks and starts nothing.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(dirname "$here")
name=$1
shift

GPUS_PER_NODE=${GPUS_PER_NODE:-8}
NUM_NODES=${NUM_NODES:-1}
NODE_RANK=${NODE_RANK:-0}
if [[ ${LAUNCHER:-} != srun ]]; then
    MASTER_ADDR=${MASTER_ADDR:-localhost}
    MASTER_PORT=${MASTER_PORT:-6000}
fi
# Kernels reach the GPU in the order of their launch, so that communication is not overtaken by computation.
export CUDA_DEVICE_MAX_CONNECTIONS=1

paths=()
while [[ ${#paths[@]} -lt 4 && $# -gt 0 && $1 != -* ]]; do
    paths+=("$1")
    shift
done
case ${#paths[@]} in
0) ;;
4) set -- --save "${paths[0]}" --load "${paths[0]}" --tensorboard-dir "${paths[1]}" --vocab-file "${paths[2]}" \
    --data-path "${paths[3]}" "$@" ;;
*)
    echo "error: give all of CHECKPOINT_PATH TENSORBOARD_LOGS_PATH VOCAB_FILE DATA_PATH, or none of them" >&2
    exit 2
    ;;
esac

# Beside the checkout's recipes lies bert_ds/; in an installed package the recipes lie inside bert_ds/.
script=$root/bert_ds/pretrain.py
[[ -f $script ]] || script=$(dirname "$root")/pretrain.py
[[ -d $root/.venv/bin ]] && PATH=$root/.venv/bin:$PATH
set -- "$script" --deepspeed_config "$root/ds_configs/$name.json" "$@"

if [[ ${DRY_RUN:-0} != 0 ]]; then
    ranks=$((GPUS_PER_NODE * NUM_NODES))
    [[ ${LAUNCHER:-} == srun ]] && ranks=${SLURM_NTASKS:?LAUNCHER=srun belongs into a Slurm job}
    exec python3 "$@" --dry-run --world-size "$ranks"
elif [[ ${LAUNCHER:-} == srun ]]; then
    # A rank that has died ends the others after a minute; ranks that save and end one after another are let be.
    # shellcheck disable=SC2086 # several words
    exec srun --kill-on-bad-exit=0 --wait=60 ${SRUN_FLAGS:-} python3 -u "$@"
elif [[ $NUM_NODES -eq 1 ]]; then
    # DeepSpeed's launcher ends all ranks when one dies, and needs neither ssh nor hostfile on one machine.
    devices=(--num_gpus "$GPUS_PER_NODE")
    if [[ -n ${CUDA_VISIBLE_DEVICES:-} ]]; then
        # --num_gpus would overlook this variable and take the first GPUs of the machine.
        IFS=, read -ra visible <<<"$CUDA_VISIBLE_DEVICES"
        if [[ ${#visible[@]} -lt $GPUS_PER_NODE ]]; then
            echo "error: GPUS_PER_NODE=$GPUS_PER_NODE but CUDA_VISIBLE_DEVICES=$CUDA_VISIBLE_DEVICES names" \
                "${#visible[@]}. Fix: set GPUS_PER_NODE=${#visible[@]}." >&2
            exit 2
        fi
        devices=(--include "localhost:$(cut -d, -f "1-$GPUS_PER_NODE" <<<"$CUDA_VISIBLE_DEVICES")")
    fi
    # Ended by a SIGTERM alone, `deepspeed` would leave its ranks running: the signal goes to what it has started, which
    # lets them save.
    deepspeed "${devices[@]}" --master_port "$MASTER_PORT" "$@" &
    launcher=$!
    trap 'pkill -TERM -P "$launcher" || kill -TERM "$launcher"' TERM
    trap : INT  # the terminal tells all of them
    # A trapped signal interrupts `wait`, which then tells of the signal, not of the launcher.
    while true; do
        code=0
        wait "$launcher" || code=$?
        kill -0 "$launcher" 2>/dev/null || exit "$code"
    done
else
    # For several machines DeepSpeed's launcher wants a hostfile and ssh between them. torchrun is started once on each, as
    # Megatron-LM's script is, which schedulers and containers allow.
    exec torchrun --nproc_per_node "$GPUS_PER_NODE" --nnodes "$NUM_NODES" --node_rank "$NODE_RANK" \
        --master_addr "$MASTER_ADDR" --master_port "$MASTER_PORT" "$@"
fi
