#!/usr/bin/env bash
# BERT-large, 340 million parameters. Arguments and variables: see launch.sh.
exec "$(dirname "${BASH_SOURCE[0]}")/launch.sh" 340m "$@"
