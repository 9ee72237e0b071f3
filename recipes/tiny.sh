#!/usr/bin/env bash
# A toy BERT, on CPU cores too. Arguments and variables: see launch.sh.
export GPUS_PER_NODE=${GPUS_PER_NODE:-1}
exec "$(dirname "${BASH_SOURCE[0]}")/launch.sh" tiny "$@"
