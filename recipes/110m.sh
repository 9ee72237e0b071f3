#!/usr/bin/env bash
# BERT-base, 110 million parameters. Arguments and variables: see launch.sh.
exec "$(dirname "${BASH_SOURCE[0]}")/launch.sh" 110m "$@"
