#!/usr/bin/env bash
# BERT with 4 billion parameters. Arguments and variables: see launch.sh.
exec "$(dirname "${BASH_SOURCE[0]}")/launch.sh" 4b "$@"
