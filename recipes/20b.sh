#!/usr/bin/env bash
# BERT with 20 billion parameters; TP 4 x PP 4 needs two machines of 8 GPUs. Arguments and variables: see launch.sh.
export NUM_NODES=${NUM_NODES:-2}
exec "$(dirname "${BASH_SOURCE[0]}")/launch.sh" 20b "$@"
