"""An export is what `transformers` computes with, is whole or not there, and leaves the checkpoint alone."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from bert_ds.checkpoint import files
from bert_ds.checkpoint.reader import Checkpoint
from bert_ds.config.model import ModelConfig
from bert_ds.convert import huggingface, verify
from bert_ds.convert.__main__ import main
from bert_ds.convert.huggingface import ExportOptions, export_to_huggingface
from bert_ds.convert.model_card import model_card
from bert_ds.convert.verify import RandomRows, largest_difference
from bert_ds.data.tokenizer import WordPieceTokenizer
from bert_ds.data.vocabulary import Vocabulary
from bert_ds.errors import CheckpointError
from tests.checkpoint.saved_checkpoints import (
    TOKENS,
    Layout,
    content_of,
    model_config,
    random_tensors,
    save,
)

transformers = pytest.importorskip("transformers")

WEIGHTS_ONLY = ["weight"]
ONE_RANK, EIGHT_RANKS = Layout(), Layout(tp=2, pp=2, dp=2)
NOT_VERIFIED = ExportOptions(verify=False)


def saved(save_dir: Path, layout: Layout = ONE_RANK, **changes: object) -> tuple[Path, ModelConfig, dict[str, Tensor]]:
    config = model_config(**changes)
    tensors = random_tensors(config, kinds=WEIGHTS_ONLY)
    return save(save_dir, config, tensors, layout=layout), config, tensors


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return saved(tmp_path / "save", EIGHT_RANKS)[0]


@pytest.mark.proves(
    "exported logits against transformers: small models in float64 / fp32, of the largest logit",
    "1e-12", "1e-5")
@pytest.mark.parametrize("binary_head", [True, False], ids=["sop", "mlm-only"])
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
@pytest.mark.parametrize("norm_placement", ["pre", "post"])
def test_transformers_computes_the_same_logits(
    tmp_path: Path, norm_placement: str, activation: str, binary_head: bool
) -> None:
    folder, config, _ = saved(tmp_path, EIGHT_RANKS, norm_placement=norm_placement, activation=activation,
                              binary_head=binary_head)
    report = export_to_huggingface(folder, tmp_path / "out", ExportOptions())
    assert report.difference is not None
    assert (report.difference.sop is None) != binary_head
    exact = largest_difference(Checkpoint.open(folder), config, tmp_path / "out", torch.float32, compute=torch.float64)
    assert exact.largest < 1e-12
    assert exact.largest_logit > 1
    model = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "out")
    assert model.config.model_type == {"pre": "megatron-bert", "post": "bert"}[norm_placement]


@pytest.mark.parametrize("changes", [
    {"layernorm_epsilon": 1e-4}, {"activation": "gelu_tanh"}, {"norm_placement": "post"},
])
def test_a_wrong_setting_in_config_json_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], changes: dict[str, object]
) -> None:
    """The exporter is made to describe another model than the one whose weights it writes."""
    folder, *_ = saved(tmp_path / "save")
    truth = verify.our_logits

    def of_the_other_model(ignored, *rest):  # type: ignore[no-untyped-def]
        return truth(model_config(**changes), *rest)

    monkeypatch.setattr(verify, "our_logits", of_the_other_model)
    assert main(["to-hf", str(folder), str(tmp_path / "out")]) == 2
    assert "transformers computes other logits than the checkpoint's model" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["save"]


def test_a_missing_tensor_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, *_ = saved(tmp_path / "save")
    write = huggingface.write_weights

    def without_the_heads(folder, source, config, **options):  # type: ignore[no-untyped-def]
        return write(folder, source, model_config(binary_head=False), **options)

    monkeypatch.setattr(huggingface, "write_weights", without_the_heads)
    assert main(["to-hf", str(folder), str(tmp_path / "out")]) == 2
    assert "bert.pooler.dense.bias" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["save"]


def test_bos_and_eos_that_training_appended_are_left_out(tmp_path: Path) -> None:
    folder, config, tensors = saved(tmp_path / "save", vocab_size=len(TOKENS) + 2, make_vocab_size_divisible_by=17)
    assert config.padded_vocab_size == len(TOKENS) + 2
    assert export_to_huggingface(folder, tmp_path / "out", ExportOptions()).difference is not None
    words = load_file(tmp_path / "out" / "model.safetensors")["bert.embeddings.word_embeddings.weight"]
    assert torch.equal(words, tensors["weight/embedding.word_embeddings.weight"][:len(TOKENS)])
    assert transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "out").config.vocab_size == len(TOKENS)
    other, *_ = saved(tmp_path / "other", vocab_size=len(TOKENS) + 1)
    with pytest.raises(CheckpointError, match="entries do not make the model's vocab_size 33"):
        export_to_huggingface(other, tmp_path / "none", ExportOptions())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_rounded_once(checkpoint: Path, tmp_path: Path, dtype: str) -> None:
    out = tmp_path / "out"
    report = export_to_huggingface(checkpoint, out, ExportOptions(dtype=dtype))
    assert report.difference is not None
    stored = load_file(out / "model.safetensors")["bert.embeddings.word_embeddings.weight"]
    full = Checkpoint.open(checkpoint).read_full("weight", "embedding.word_embeddings.weight")
    assert torch.equal(stored, full[: len(stored)].to(getattr(torch, dtype)))
    assert transformers.AutoModelForMaskedLM.from_pretrained(out, dtype="auto").dtype == stored.dtype


@pytest.mark.parametrize("untie", [False, True])
def test_shards_hold_what_one_file_would(checkpoint: Path, tmp_path: Path, untie: bool) -> None:
    export_to_huggingface(checkpoint, tmp_path / "one", ExportOptions(untie=untie))
    report = export_to_huggingface(checkpoint, tmp_path / "many", ExportOptions(untie=untie, max_shard_bytes=5000))
    assert len(report.weight_files) > 5
    assert report.weight_files[0] == f"model-00001-of-{len(report.weight_files):05d}.safetensors"
    whole = load_file(tmp_path / "one" / "model.safetensors")
    assert ("cls.predictions.decoder.weight" in whole) == untie
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in whole.values())
    assert index["weight_map"].keys() == whole.keys()
    for name in report.weight_files:
        shard = load_file(tmp_path / "many" / name)
        assert all(index["weight_map"][key] == name and torch.equal(whole[key], value) for key, value in shard.items())
        assert sum(tensor.nbytes for tensor in shard.values()) <= 5000 or len(shard) == 1


def test_every_field_of_config_json(tmp_path: Path) -> None:
    folder, *_ = saved(tmp_path / "save", norm_placement="post", layernorm_epsilon=1e-5, hidden_dropout=0.2)
    export_to_huggingface(folder, tmp_path / "out", NOT_VERIFIED)
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {
        "architectures": ["BertForPreTraining"], "model_type": "bert", "vocab_size": 32, "hidden_size": 24,
        "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40, "hidden_act": "gelu",
        "hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.1, "max_position_embeddings": 20,
        "position_embedding_type": "absolute", "type_vocab_size": 2, "initializer_range": 0.02, "layer_norm_eps": 1e-5,
        "pad_token_id": 0, "tie_word_embeddings": True, "is_decoder": False, "use_cache": False, "dtype": "float32",
    }


TEXTS = (
    "The CAT sat on the mat.", "Cats, walking: unable!", "café Café CAFE\u0301", "中the中",
    "12 a's b\u00a0b\u200d\tcat\x0bs", "x" * 101, "a" * 100, "",
)


@pytest.mark.parametrize("tokenizer_type", ["BertWordPieceLowerCase", "BertWordPieceCase"])
def test_the_tokenizer_gives_the_ids_of_training(tmp_path: Path, tokenizer_type: str) -> None:
    config = model_config()
    folder = save(tmp_path / "save", config, random_tensors(config, kinds=WEIGHTS_ONLY), tokenizer_type=tokenizer_type)
    export_to_huggingface(folder, tmp_path / "out", NOT_VERIFIED)
    vocabulary = Vocabulary.from_file(str(folder / "vocab.txt"))
    ours = WordPieceTokenizer(vocabulary, tokenizer_type)
    assert (tmp_path / "out" / "vocab.txt").read_bytes() == (folder / "vocab.txt").read_bytes()
    for lost in ("", "tokenizer.json"):
        if lost:
            (tmp_path / "out" / lost).unlink()
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
        assert theirs.model_max_length == 20
        assert theirs.mask_token_id == vocabulary.mask_id
        for text in TEXTS:
            expected = [int(token_id) for token_id in ours.encode(text)]
            assert theirs(text)["input_ids"] == [vocabulary.cls_id, *expected, vocabulary.sep_id], repr(text)
        pair = theirs("the cat", "a mat")
        assert pair["input_ids"] == [2, 5, 6, 3, 14, 10, 3]
        assert pair["token_type_ids"] == [0, 0, 0, 0, 1, 1, 1]
        assert theirs("the [MASK]")["input_ids"] == [2, 5, 4, 3]


def test_the_model_card_tells_the_runs_facts_only(checkpoint: Path, tmp_path: Path) -> None:
    export_to_huggingface(checkpoint, tmp_path / "out", ExportOptions(license_name="apache-2.0"))
    card = (tmp_path / "out" / "README.md").read_text()
    for fact in (
        "license: apache-2.0", "- megatron-bert", "2 x 24 x 4", "pre-LN", "GELU (exact, erf)", "epsilon 1e-05",
        "| data | books_text_sentence |", "100 (1 skipped", "3200 of up to 16 tokens", "AdamW", "| lm_loss | 3.25 |",
        "label 1 that they were swapped", "of the largest logit", "tensor 2 x pipeline 2 x data 2",
    ):
        assert fact in card, fact
    assert "/home/someone" not in card
    export_to_huggingface(checkpoint, tmp_path / "plain", NOT_VERIFIED)
    plain = (tmp_path / "plain" / "README.md").read_text()
    assert "license" not in plain
    assert "Not verified against `transformers`: verification was switched off." in plain


@pytest.mark.parametrize(("task", "tag", "meaning"), [
    ("order", "sentence-order-prediction", "label 1 that they were swapped"),
    ("random_next", "next-sentence-prediction", "label 1 that it is from another document"),
])
def test_the_model_card_tells_what_sentence_labels_mean(checkpoint: Path, task: str, tag: str, meaning: str) -> None:
    manifest = Checkpoint.open(checkpoint).manifest
    manifest = replace(manifest, config={**manifest.config, "data": {**manifest.config["data"], "sentence_task": task}})
    card = model_card(manifest, model_config(), name="m", dtype="float32", license_name=None, verification="none")
    assert f"- {tag}\n" in card
    assert meaning in card


def test_the_snippet_of_the_card_runs(checkpoint: Path, tmp_path: Path) -> None:
    export_to_huggingface(checkpoint, tmp_path / "my model", NOT_VERIFIED)
    card = (tmp_path / "my model" / "README.md").read_text()
    snippet = card.partition("```python\n")[2].partition("```")[0]
    done = subprocess.run([sys.executable, "-c", snippet], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.count("'") == 10


def test_the_command_exports_the_latest_and_says_how_to_load_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(tmp_path / "save")
    before = content_of(tmp_path / "save")
    assert main(["to-hf", str(tmp_path / "save"), str(tmp_path / "out"), "--max-shard-size", "0.01MB"]) == 0
    printed = capsys.readouterr().out
    assert "iter_0000100" in printed
    assert "shards" in printed
    assert "of the largest logit" in printed
    assert f"AutoModelForMaskedLM.from_pretrained('{tmp_path / 'out'}')" in printed
    assert content_of(tmp_path / "save") == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "save"]


def test_an_existing_folder_is_replaced_on_request_only(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    command = ["to-hf", str(checkpoint), str(out), "--no-verify"]
    out.mkdir()
    (out / "thesis.tex").write_text("years of work")
    for force, message in (([], "exists already"), (["--force"], "is no earlier output (it has no config.json)")):
        assert main([*command, *force]) == 2
        assert message in capsys.readouterr().err
    assert (out / "thesis.tex").read_text() == "years of work"
    (out / "config.json").write_text("{}")
    assert main([*command, "--force"]) == 0
    assert not (out / "thesis.tex").exists()
    assert (out / "model.safetensors").exists()


@pytest.mark.parametrize("place", ["", "hf", "..", "../.."])
def test_the_checkpoint_is_never_touched(
    checkpoint: Path, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = content_of(checkpoint.parent)
    assert main(["to-hf", str(checkpoint), str(checkpoint / place), "--force", "--no-verify"]) == 2
    assert "overlaps the checkpoint" in capsys.readouterr().err
    assert content_of(checkpoint.parent) == before


def test_a_failed_export_leaves_nothing(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    assert main(["to-hf", str(checkpoint), str(tmp_path / "deep" / "out"), "--no-verify"]) == 2
    assert "No space left on device" in capsys.readouterr().err
    assert list((tmp_path / "deep").iterdir()) == []


def test_bad_input_is_one_message(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["to-hf", str(tmp_path / "nowhere"), str(tmp_path / "out")]) == 2
    assert "nowhere: is no folder" in capsys.readouterr().err
    damaged = checkpoint / "rank_00003.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    assert main(["to-hf", str(checkpoint), str(tmp_path / "out")]) == 2
    assert "rank_00003.safetensors: has other content" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    with pytest.raises(SystemExit) as stop:
        main(["to-hf", str(checkpoint), str(tmp_path / "out"), "--max-shard-size", "big"])
    assert stop.value.code == 2


def test_a_vocabulary_of_another_size_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, *_ = saved(tmp_path / "save", vocab_size=31)
    assert main(["to-hf", str(folder), str(tmp_path / "out")]) == 2
    assert "entries do not make the model's vocab_size 31" in capsys.readouterr().err


def test_without_transformers_it_says_so(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reasons = {None: "transformers is not installed", "4.40.0": "transformers 4.40.0 is older than 4.57"}
    for found, reason in reasons.items():
        monkeypatch.setattr(verify, "installed_version", lambda _, found=found: found)
        assert main(["to-hf", str(checkpoint), str(tmp_path / "out"), "--force"]) == 0
        assert f"Not verified against `transformers`: {reason}" in capsys.readouterr().out
    monkeypatch.setattr(verify, "installed_version", lambda _: "5.0")
    monkeypatch.setattr(verify, "_bytes_available", lambda: 1000)
    assert main(["to-hf", str(checkpoint), str(tmp_path / "out"), "--force"]) == 0
    assert "0.0 GB are free" in capsys.readouterr().out


def test_writing_needs_neither_transformers_nor_deepspeed(checkpoint: Path, tmp_path: Path) -> None:
    program = """
import sys
from bert_ds.convert.__main__ import main
code = main(sys.argv[1:])
assert not {"transformers", "deepspeed"} & set(sys.modules), "imported"
sys.exit(code)
"""
    command = [sys.executable, "-c", program, "to-hf", str(checkpoint), str(tmp_path / "out"), "--no-verify"]
    subprocess.run(command, check=True, capture_output=True, cwd=Path(__file__).parents[2])


def test_the_rows_of_the_comparison_are_padded_and_use_every_position() -> None:
    rows = RandomRows.draw(model_config(), pad_token_id=0)
    lengths = rows.mask.sum(1)
    assert lengths[0] == 20
    assert 10 <= lengths[1] < 20
    assert rows.input_ids[1, lengths[1] :].eq(0).all()
    assert rows.token_type_ids.unique().tolist() == [0, 1]
