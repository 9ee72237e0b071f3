#!/usr/bin/env bash
# Trains the recipe NAME on this machine, in a container on NVIDIA's PyTorch image:
#
#   CHECKPOINT_PATH=/ckpt/340m TENSORBOARD_LOGS_PATH=/runs/340m VOCAB_FILE=/data/bert-vocab.txt \
#       DATA_PATH=/data/corpus_text_sentence recipes/docker.sh 340m [flags of pretrain.py]
#
# The four paths are visible in the container under the names that they have here. Variables:
#   PYTORCH_IMAGE   image to build on; 25.02-py3 or newer, the Dockerfile says why and which is the default
#   IMAGE (bert_ds) name of the image that is built
#   DOCKER_FLAGS    more options of `docker run`, such as --user 1000:1000 or --network host
#   GPUS_PER_NODE, NUM_NODES, NODE_RANK, MASTER_ADDR, MASTER_PORT   see launch.sh; several machines need --network host
#   DRY_RUN=1       prints what the run would be and starts nothing, in the container
set -euo pipefail

root=$(dirname "$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)")
if [[ $# -eq 0 || ! -f $root/recipes/$1.sh ]]; then
    echo "error: NAME=${1:-}: is no recipe. Fix: recipes/docker.sh NAME [flags], as in recipes/docker.sh 340m" >&2
    exit 2
fi
if [[ ! -f $root/setup.py ]]; then
    echo "error: $root: the image is built from a checkout, which an installed package is not. Fix: clone one." >&2
    exit 2
fi
missing=()
for variable in CHECKPOINT_PATH TENSORBOARD_LOGS_PATH VOCAB_FILE DATA_PATH; do
    [[ -n ${!variable:-} ]] || missing+=("$variable")
done
if [[ ${#missing[@]} -gt 0 ]]; then
    echo "error: ${missing[*]}: not set. Fix: set all four paths, see the head of $0" >&2
    exit 2
fi
name=$1
shift
image=${IMAGE:-bert_ds}

mkdir -p "$CHECKPOINT_PATH" "$TENSORBOARD_LOGS_PATH"
checkpoints=$(realpath "$CHECKPOINT_PATH") logs=$(realpath "$TENSORBOARD_LOGS_PATH")
vocabulary=$(realpath "$VOCAB_FILE") data=$(realpath -m "$DATA_PATH")
volumes=()
for folder in "$checkpoints" "$logs" "$(dirname "$vocabulary")" "$(dirname "$data")"; do
    [[ " ${volumes[*]:-} " == *" $folder:$folder "* ]] || volumes+=(-v "$folder:$folder")
done
passed_on=()
for variable in GPUS_PER_NODE NUM_NODES NODE_RANK MASTER_ADDR MASTER_PORT DRY_RUN; do
    [[ -z ${!variable:-} ]] || passed_on+=(-e "$variable=${!variable}")
done

docker build -f "$root/recipes/Dockerfile" -t "$image" ${PYTORCH_IMAGE:+--build-arg "PYTORCH_IMAGE=$PYTORCH_IMAGE"} "$root"
# NCCL and the ranks of a machine talk through shared memory, of which a container has 64 MB by itself: --ipc=host.
# `docker stop` allows ten seconds, too few for a checkpoint: stop with `docker kill --signal TERM`, or raise --time.
# shellcheck disable=SC2086 # several words
exec docker run --rm --init --gpus=all --ipc=host --ulimit memlock=-1 --ulimit stack=67108864 \
    --workdir /workspace/bert_ds "${volumes[@]}" "${passed_on[@]}" ${DOCKER_FLAGS:-} "$image" \
    "recipes/$name.sh" "$checkpoints" "$logs" "$vocabulary" "$data" "$@"
