#!/usr/bin/env bash
# Trains the recipe NAME on several machines that share no disk and have no scheduler, through ssh:
#
#   recipes/several_nodes.sh NAME HOST,HOST... CHECKPOINT_PATH TENSORBOARD_LOGS_PATH VOCAB_FILE DATA_PATH [flags]
#
# This checkout, or one like it, lies under the same path on every machine, with its packages; ssh asks for no password.
# The vocabulary and the data are copied from here to the same paths on every machine (what is there already is not sent
# again); each builds its own index. The first machine holds rank 0 and writes the log, metrics.jsonl and TensorBoard
# files. Every machine writes the checkpoints of its own ranks to its own CHECKPOINT_PATH and, started again with the
# same hosts in the same order, goes on from them. To use a checkpoint elsewhere, bring its parts together:
#
#   for host in HOST HOST; do rsync -a $host:CHECKPOINT_PATH/iter_0010000/ merged/iter_0010000/; done
#
# Ctrl-C or SIGTERM here ends all: they save. Variables:
#   GPUS_PER_NODE (8)   MASTER_PORT (6000)
#   MASTER_ADDR         the first machine as the others reach it; its name in the list
#   COPY=0              leaves data and vocabulary as they are
#   SSH (ssh)           as in SSH="ssh -p 2222"
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
if [[ $# -lt 6 ]]; then
    echo "error: give NAME HOST,HOST... CHECKPOINT_PATH TENSORBOARD_LOGS_PATH VOCAB_FILE DATA_PATH" >&2
    exit 2
fi
name=$1
IFS=, read -ra hosts <<<"$2"
vocabulary=$(realpath "$5") data=$(realpath -m "$6")
words=("$here/$name.sh" "$(realpath -m "$3")" "$(realpath -m "$4")" "$vocabulary" "$data" "${@:7}")
read -ra ssh <<<"${SSH:-ssh}"
[[ -f $here/$name.sh ]] || { echo "error: NAME=$name: is no recipe" >&2; exit 2; }
[[ -f $data.idx ]] || { echo "error: DATA_PATH=$6: there is no $data.idx" >&2; exit 2; }

if [[ ${COPY:-1} != 0 ]]; then
    for host in "${hosts[@]}"; do
        "${ssh[@]}" "$host" "mkdir -p ${vocabulary@Q} ${data@Q}; rmdir ${vocabulary@Q} ${data@Q} 2>/dev/null || true"
        rsync -a -e "${SSH:-ssh}" "$vocabulary" "$host:$vocabulary"
        rsync -a -e "${SSH:-ssh}" "$data".* "$host:$(dirname "$data")/"
    done
fi

# What the machines read from here ends when this script does, however it ends: then they end too, by SIGTERM.
life=$(mktemp -d)
trap 'rm -r "$life"' EXIT
mkfifo "$life/line"
nodes=()
for rank in "${!hosts[@]}"; do
    variables=(NUM_NODES="${#hosts[@]}" NODE_RANK="$rank" MASTER_ADDR="${MASTER_ADDR:-${hosts[0]}}"
        MASTER_PORT="${MASTER_PORT:-6000}" GPUS_PER_NODE="${GPUS_PER_NODE:-8}")
    there="exec 3<&0; env ${variables[*]@Q} ${words[*]@Q} & node=\$!
        (cat <&3; kill -TERM \$node) >/dev/null 2>&1 & wait \$node; code=\$?; kill \$! 2>/dev/null; exit \$code"
    "${ssh[@]}" "${hosts[$rank]}" "$there" <"$life/line" > >(sed -u "s/^/${hosts[$rank]}: /") 2>&1 &
    nodes+=($!)
done
exec 9>"$life/line"
trap 'exec 9>&-' TERM INT

code=0
for node in "${nodes[@]}"; do
    # A trapped signal interrupts `wait`, which then tells of the signal, not of the node.
    while true; do
        its=0
        wait "$node" || its=$?
        kill -0 "$node" 2>/dev/null || break
    done
    [[ $code -ne 0 ]] || code=$its
done
exit "$code"
