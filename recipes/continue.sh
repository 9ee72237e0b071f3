#!/usr/bin/env bash
# Goes on with the pretraining of a public BERT on your own text: converts, preprocesses, trains.
#
#   recipes/continue.sh MODEL TEXT OUT [flags of pretrain.py]
#
#   MODEL  folder of a Hugging Face model of type bert or megatron-bert, with its tokenizer
#   TEXT   JSON lines or plain text, as `python -m bert_ds.preprocess_data --input` takes it
#   OUT    folder for all that is made: start/NAME (the converted model), data, checkpoints, runs
#
# Started again it goes on where it stopped. Variables: see launch.sh. DRY_RUN=1 converts the model, whose shape it needs,
# prints what the run would be and starts nothing. Afterwards:
#
#   python -m bert_ds.convert to-hf OUT/checkpoints OUT/export
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(dirname "$here")
if [[ $# -lt 3 || $1 == -* || $2 == -* || $3 == -* ]]; then
    echo "error: give MODEL TEXT OUT, then flags of pretrain.py" >&2
    exit 2
fi
model=$1 text=$2 out=$3
shift 3
name=$(cd "$model" 2>/dev/null && basename "$PWD" || basename "$model")
start=$out/start/$name
[[ -d $root/.venv/bin ]] && PATH=$root/.venv/bin:$PATH
[[ -d $root/bert_ds ]] && export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}

if [[ ${NODE_RANK:-0} -eq 0 ]]; then
    [[ -e $start ]] || python3 -m bert_ds.convert from-hf "$model" "$start"
    if [[ ! -e $out/data/corpus_text_sentence.idx && ${DRY_RUN:-0} == 0 ]]; then
        tokenizer=$(python3 - "$start" <<'PROGRAM'
import json, pathlib, sys
start = pathlib.Path(sys.argv[1])
manifest = start / (start / "latest").read_text().strip() / "checkpoint.json"
print(json.loads(manifest.read_text())["vocabulary"]["tokenizer_type"])
PROGRAM
)
        mkdir -p "$out/data"
        python3 -m bert_ds.preprocess_data --input "$text" --output-prefix "$out/data/corpus" --split-sentences \
            --vocab-file "$start/vocab.txt" --tokenizer-type "$tokenizer"
    fi
elif [[ ! -e $out/data/corpus_text_sentence.idx ]]; then
    echo "error: OUT=$out: node 0 has not made the data yet. Fix: start it first, and the others when it trains." >&2
    exit 2
fi

exec "$here/launch.sh" continue --load "$start" --save "$out/checkpoints" --tensorboard-dir "$out/runs" \
    --data-path "$out/data/corpus_text_sentence" "$@"
