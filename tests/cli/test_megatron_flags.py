"""Command lines of Megatron-LM as they stand, and what becomes of each of its flags."""

from __future__ import annotations

from pathlib import Path

import flag_table
import pytest
from megatron_script import TRAIN_BERT_340M

from bert_ds.cli.argument_files import ARGUMENT_FILES
from bert_ds.cli.dry_run import dry_run_text
from bert_ds.cli.flags import FLAGS
from bert_ds.cli.megatron_flags import ONLY, REFUSED, VALUE_WITHOUT_EFFECT, WITHOUT_EFFECT
from bert_ds.cli.resolve import ResolvedRun, resolve_run
from bert_ds.cli.virtual_stages import FLAG as VIRTUAL_STAGES
from bert_ds.errors import ConfigError
from bert_ds.preprocess_data import main as preprocess

README_4B = """--num-layers 48 --hidden-size 2560 --num-attention-heads 32 --tensor-model-parallel-size 1
    --pipeline-model-parallel-size 1"""
README_20B = """--num-layers 48 --hidden-size 6144 --num-attention-heads 96 --tensor-model-parallel-size 4
    --pipeline-model-parallel-size 4"""

# The test recipes bert_mcore_* and bert_release*: what all of them have, what each family adds, and each by itself.
RECIPES = """
    --num-layers 24 --hidden-size 1024 --num-attention-heads 16 --log-params-norm --log-num-zeros-in-grad
    --log-validation-ppl-to-tensorboard --log-timers-to-tensorboard --log-memory-to-tensorboard --tensorboard-dir tb
    --micro-batch-size 4 --seq-length 512 --max-position-embeddings 512 --vocab-file vocab.txt --split 949,50,1
    --lr 0.0001 --save ckpt --load ckpt --eval-interval 1000 --eval-iters 10 --data-cache-path cache
"""
MCORE = RECIPES + """
    --global-batch-size 128 --timing-log-level 0 --data-path my-bert_00_text_sentence --distributed-backend nccl
    --min-lr 0.00001 --lr-warmup-fraction 0.01 --lr-decay-iters 990000 --log-interval 1
    --no-gradient-accumulation-fusion --deterministic-mode --bf16 --ckpt-format torch
"""
RESUME = """--train-iters 100 --save-interval 50 --use-checkpoint-args --use-checkpoint-opt_param-scheduler
    --dist-ckpt-strictness log_all"""
RELEASE = RECIPES + """
    --global-batch-size 32 --fp16 --min-lr 1.0e-5 --lr-decay-style linear --lr-warmup-fraction .01 --weight-decay 1e-2
    --clip-grad 1.0 --bert-no-binary-head --log-interval 100 --attention-backend unfused --train-iters 20000
    --save-interval 2000 --save-retain-interval 10000 --exit-interval 20000 --data-path 0.7 books 0.3 pages
    --wandb-project megatron-core-release-runs --wandb-entity adlr --wandb-exp-name bert --wandb-save-dir logs
    --tensor-model-parallel-size 8 --pipeline-model-parallel-size 8
"""
CASES = {
    "tp1_pp2": MCORE + """--tensor-model-parallel-size 1 --pipeline-model-parallel-size 2 --attention-backend unfused
        --train-iters 50 --save-interval 10000""",
    # As it stands this one has three virtual stages a rank, see below.
    "tp1_pp4_vp2": MCORE + """--tensor-model-parallel-size 1 --pipeline-model-parallel-size 4
        --num-layers-per-virtual-pipeline-stage 3 --attention-backend unfused --train-iters 50 --save-interval 10000""",
    "tp4_pp1": MCORE + """--tensor-model-parallel-size 4 --pipeline-model-parallel-size 1 --attention-backend unfused
        --train-iters 50 --save-interval 10000""",
    "tp2_pp2_local_spec": MCORE + """--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --spec local
        --attention-backend local --train-iters 50 --save-interval 10000""",
}

# Flags of Megatron-LM beyond those above that its training script takes and that concern BERT.
OTHERS = """
    --ffn-hidden-size --kv-channels --hidden-dropout --attention-dropout --norm-epsilon --init-method-std --adam-beta1
    --adam-beta2 --adam-eps --lr-warmup-init --seed --mask-prob --short-seq-prob --bert-no-binary-head
    --make-vocab-size-divisible-by --untie-embeddings-and-output-weights --tokenizer-type --loss-scale
    --initial-loss-scale --min-loss-scale --loss-scale-window --hysteresis --split --dataloader-type --num-workers
    --distributed-backend --ckpt-format --no-bias-gelu-fusion --no-bias-dropout-fusion --no-masked-softmax-fusion
    --no-gradient-accumulation-fusion --sequence-parallel --use-distributed-optimizer --eval-micro-batch-size
    --eval-global-batch-size --spec --train-data-path --valid-data-path --test-data-path --data-args-path
    --per-split-data-args-path --data-cache-path --mid-level-dataset-surplus --allow-ambiguous-pad-tokens
    --full-validation --tokenizer-model --merge-file --vocab-size --decoupled-weight-decay --decoupled-lr
    --decoupled-min-lr --optimizer --lr-decay-samples --lr-warmup-samples --lr-warmup-iters --lr-wsd-decay-iters
    --lr-wsd-decay-style --start-weight-decay --end-weight-decay --weight-decay-incr-style
    --accumulate-allreduce-grads-in-fp32 --ddp-average-in-collective --overlap-grad-reduce --overlap-param-gather
    --train-samples --log-throughput --log-energy --timing-log-option --log-world-size-to-tensorboard
    --no-log-loss-scale-to-tensorboard --tensorboard-queue-size --tensorboard-log-interval --wandb-project
    --exit-interval --exit-signal-handler --adlr-autoresume --save-retain-interval --async-save --log-progress
    --manual-gc --exit-on-missing-checkpoint --finetune --no-load-optim --no-load-rng --no-save-optim --no-save-rng
    --ckpt-step --use-checkpoint-args --override-opt-param-scheduler --use-checkpoint-opt-param-scheduler
    --recompute-granularity --recompute-method --recompute-num-layers --recompute-activations
    --use-cpu-initialization --data-parallel-random-init --pipeline-model-parallel-layout --openai-gelu --onnx-safe
    --num-virtual-stages-per-pipeline-rank --account-for-embedding-in-pipeline-split --attention-softmax-in-fp32
    --account-for-loss-in-pipeline-split --cross-entropy-loss-fusion --fp32-residual-connection --use-legacy-models
    --tokenizer-hf-no-include-special-tokens --use-mcore-models --transformer-impl
    --exit-duration-in-mins --skip-train --rampup-batch-size --step-batch-size-schedule --decrease-batch-size-if-needed
    --iterations-to-skip --train-sync-interval --rerun-mode --no-check-for-nan-in-loss-and-grad --exit-signal
""".split()


def resolved(arguments: str, world_size: int) -> ResolvedRun:
    return resolve_run([*arguments.split(), "--dry-run", "--world-size", str(world_size)], world_size=1)


@pytest.mark.parametrize(("arguments", "ranks", "parameters"), [
    (TRAIN_BERT_340M, 128, "336,297,858"),
    (TRAIN_BERT_340M + README_4B, 8, "3,869,260,674"),
    (TRAIN_BERT_340M + README_20B, 16, "22,013,798,274"),
])
def test_the_script_and_the_sizes_of_the_readme_run_as_they_stand(arguments: str, ranks: int, parameters: str) -> None:
    run = resolved(arguments, ranks)
    told = dry_run_text(run)
    assert f"on {ranks} ranks" in told and parameters in told
    assert not run.remarks  # nothing was left without effect, and what is given twice contradicts nothing
    assert (run.config.engine.weight_decay, run.config.engine.gradient_clipping) == (0.01, 1.0)


@pytest.mark.parametrize("name", CASES)
def test_test_recipes_run_as_they_stand(name: str) -> None:
    run = resolved(CASES[name], 8)
    assert (run.config.engine.global_batch_size, run.config.schedule.lr_decay_iters) == (128, 990_000)
    idle = {remark.split()[0] for remark in run.remarks if "has no effect" in remark}
    assert idle == {"--log-params-norm", "--log-num-zeros-in-grad", "--log-validation-ppl-to-tensorboard",
                    "--log-timers-to-tensorboard", "--log-memory-to-tensorboard", "--timing-log-level",
                    "--distributed-backend", "--no-gradient-accumulation-fusion", "--ckpt-format"}


def test_the_release_recipe_keeps_the_checkpoints_that_megatron_keeps() -> None:
    run = resolved(RELEASE, 64).config
    assert (run.output.save_interval, run.output.keep_every, run.output.keep_last) == (2000, 10_000, 1)
    assert (run.schedule.exit_interval, run.schedule.decay_iters, run.schedule.warmup_iters) == (20_000, 20_000, 200)
    assert run.data.data_path == ("0.7", "books", "0.3", "pages") and not run.model.binary_head
    assert resolved(RELEASE + "--keep-last 4", 64).config.output.keep_last == 4


def test_what_would_be_another_run_is_refused_with_what_to_use_instead() -> None:
    with pytest.raises(ConfigError) as caught:
        resolved(TRAIN_BERT_340M + "--optimizer sgd --swiglu --dataloader-type cyclic --model-parallel-size 8", 128)
    told = str(caught.value)
    for expected in ("--optimizer=sgd: the optimizer is AdamW. Fix: leave it out.", "--dataloader-type=cyclic: ",
                     "--swiglu=true: BERT's feed-forward layers have one matrix in and one out. Fix: choose --activ",
                     "--model-parallel-size=8: has been replaced in Megatron-LM. Fix: give --tensor-model-parallel"):
        assert expected in told, told
    remarks = resolved(TRAIN_BERT_340M + "--optimizer adam", 128).remarks
    assert remarks == ("--optimizer has no effect: the optimizer is AdamW",)


def test_every_flag_has_one_outcome_and_no_flag_of_megatron_is_unknown() -> None:
    names = [*(flag.name for flag in FLAGS), *WITHOUT_EFFECT, *VALUE_WITHOUT_EFFECT, *ONLY, *REFUSED, *ARGUMENT_FILES,
             VIRTUAL_STAGES]
    assert len(names) == len(set(names))
    written = " ".join([TRAIN_BERT_340M, README_4B, RESUME, RELEASE, *CASES.values(), *OTHERS])
    flags = {word.replace("_", "-") for word in written.split() if word.startswith("--")}
    assert len(flags) > 120
    assert flags - set(names) == set()


def test_the_tables_of_the_readme_are_those_of_the_code() -> None:
    assert flag_table.IN_README.shown() == flag_table.tables(), "run: python tests/support/flag_table.py"


def test_test_recipes_that_are_not_served_say_what_to_give() -> None:
    with pytest.raises(ConfigError, match=r"--use-checkpoint-opt-param-scheduler=true: .* Fix: give --lr, "):
        resolved(CASES["tp1_pp2"] + RESUME, 8)
    with pytest.raises(ConfigError, match=r"--num-layers-per-virtual-pipeline-stage=2: .* Fix: give 3"):
        resolved(CASES["tp1_pp4_vp2"].replace("pipeline-stage 3", "pipeline-stage 2"), 8)


PREPROCESSING = """--input text.jsonl --output-prefix my-bert --vocab-file vocab.txt --tokenizer-type
    BertWordPieceLowerCase --split-sentences --json-keys text --workers 1 --log-interval 1000 --append-eod"""


def test_megatrons_preprocessing_runs_as_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.jsonl").write_text('{"text": "One stone. One bird."}\n')
    (tmp_path / "vocab.txt").write_text("".join(f"{word}\n" for word in (
        "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", "one", "stone", "bird")))
    code = preprocess([*PREPROCESSING.split(), "--partitions", "1", "--keep-sequential-samples", "--lang", "english"])
    told = capsys.readouterr()
    assert code == 0, told.err
    assert told.out.count("has no effect") == 3 and (tmp_path / "my-bert_text_sentence.bin").is_file()
    assert preprocess([*PREPROCESSING.split(), "--find-optimal-num-workers", "--merge-file=m.txt"]) == 2
    told = capsys.readouterr()
    assert "--find-optimal-num-workers=given: " in told.err and "--merge-file=m.txt: " in told.err
    assert preprocess([*PREPROCESSING.split(), "--lang", "german"]) == 2
    assert "--lang=german: sentences are split by the rules of English. Fix: split them" in capsys.readouterr().err
