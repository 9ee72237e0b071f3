#!/usr/bin/env bash
# Pretrains in two phases, with one command: short rows for most of the iterations, then rows of full length, which teach
# the later positions. Nine tenths at 128 tokens and one tenth at 512 are those of Devlin et al. (2019), appendix A.2.
#
#   recipes/two_phases.sh NAME CHECKPOINT_PATH TENSORBOARD_LOGS_PATH VOCAB_FILE DATA_PATH [flags of both phases]
#
# NAME is a recipe. The second phase starts from the weights of the first with a warm-up and moments of its own; each has a
# folder of its own in CHECKPOINT_PATH and TENSORBOARD_LOGS_PATH. Started again after whatever ended it, the command goes on
# where it was. Variables, beside those of launch.sh:
#   ITERS_1 (900000)  ITERS_2 (100000)    iterations
#   LENGTH_1 (128)    LENGTH_2 (512)      tokens in a row
#   FLAGS_1           FLAGS_2             flags of one phase: FLAGS_1="--micro-batch-size 16"
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
if [[ $# -lt 5 ]]; then
    echo "error: give NAME CHECKPOINT_PATH TENSORBOARD_LOGS_PATH VOCAB_FILE DATA_PATH" >&2
    exit 2
fi
name=$1 checkpoints=$2 logs=$3 vocabulary=$4 data=$5
shift 5
ITERS_1=${ITERS_1:-900000} ITERS_2=${ITERS_2:-100000} LENGTH_1=${LENGTH_1:-128} LENGTH_2=${LENGTH_2:-512}
FLAGS_1=${FLAGS_1:-} FLAGS_2=${FLAGS_2:-}

phase() { # number, iterations, row length, further flags
    local folder=$checkpoints/phase$1 code=0
    "$here/launch.sh" "$name" --save "$folder" --load "$folder" --tensorboard-dir "$logs/phase$1" \
        --vocab-file "$vocabulary" --data-path "$data" --train-iters "$2" --lr-decay-iters "$2" --seq-length "$3" "${@:4}" &
    local launched=$!
    trap 'kill -TERM "$launched"' TERM
    trap : INT # the terminal tells all of them
    while true; do
        code=0
        wait "$launched" || code=$?
        kill -0 "$launched" 2>/dev/null || break
    done
    [[ $code -eq 0 ]] || exit "$code"
}

# The variables hold several flags each.
# shellcheck disable=SC2086
phase 1 "$ITERS_1" "$LENGTH_1" "$@" $FLAGS_1
if [[ ${DRY_RUN:-0} == 0 && $(<"$checkpoints/phase1/latest") != "$(printf 'iter_%07d' "$ITERS_1")" ]]; then
    echo "the first phase is not complete; start the command again to go on"
    exit 0
fi
# shellcheck disable=SC2086
phase 2 "$ITERS_2" "$LENGTH_2" "$@" $FLAGS_2 --load "$checkpoints/phase1" --finetune
