"""A Hugging Face BERT becomes a checkpoint with the same numbers, whatever its files look like, or is refused whole."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bert_ds.checkpoint.reader import Checkpoint, locate
from bert_ds.checkpoint.run_config import model_config_from
from bert_ds.config.model import ModelConfig
from bert_ds.convert.__main__ import main
from bert_ds.convert.from_huggingface import ImportOptions, import_from_huggingface
from bert_ds.convert.hf_source import ModelChoices
from bert_ds.convert.hf_tokenizer import fast_tokenizer
from bert_ds.convert.huggingface import ExportOptions, export_to_huggingface
from bert_ds.convert.verify import RandomRows, our_logits, their_logits
from bert_ds.data.vocabulary import Vocabulary
from bert_ds.model.init import initialize_parameter
from tests.checkpoint.saved_checkpoints import (
    TOKENS,
    content_of,
    model_config,
    random_tensors,
    save,
    write_vocabulary_file,
)
from tests.convert.hf_folders import change_config, hf_model, replace_weights, save_model

transformers = pytest.importorskip("transformers")

WHOLE_MODELS = ["BertForPreTraining", "MegatronBertForPreTraining"]
NOT_VERIFIED = ImportOptions(verify=False)


def weights_of(checkpoint: Path) -> dict[str, Tensor]:
    opened = Checkpoint.open(locate(checkpoint))
    return {name: opened.read_full("weight", name) for name in opened.manifest.parameters}


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


def config_of(folder: Path) -> dict[str, Any]:
    unimportant = {"transformers_version", "bos_token_id", "eos_token_id", "add_cross_attention", "dtype",
                   "classifier_dropout", "position_embedding_type", "use_cache", "is_decoder", "tie_word_embeddings"}
    content = json.loads((folder / "config.json").read_text())
    return {key: value for key, value in content.items() if key not in unimportant}


@pytest.fixture(scope="module")
def whole_bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "bert", hf_model("BertForPreTraining"))


@pytest.fixture
def bert(whole_bert: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(whole_bert, tmp_path / "bert"))


@pytest.mark.proves("a Hugging Face model imported and exported again", "EXACT")
@pytest.mark.parametrize("activation", ["gelu", "gelu_new"])
@pytest.mark.parametrize("architecture", WHOLE_MODELS)
def test_there_and_back_is_bit_for_bit(tmp_path: Path, architecture: str, activation: str) -> None:
    folder = save_model(tmp_path / "theirs", hf_model(architecture, hidden_act=activation))
    before = content_of(folder)
    report = import_from_huggingface(folder, tmp_path / "ours", ImportOptions())
    assert "of the largest logit" in report.verification
    assert report.initialized == () and report.left_out == ()
    export_to_huggingface(report.out, tmp_path / "back", ExportOptions())
    assert_same(load_file(tmp_path / "back" / "model.safetensors"), load_file(folder / "model.safetensors"))
    assert config_of(tmp_path / "back") == config_of(folder)
    assert "| starts from | theirs, converted from huggingface |" in (tmp_path / "back" / "README.md").read_text()
    assert (tmp_path / "back" / "vocab.txt").read_bytes() == (folder / "vocab.txt").read_bytes()
    assert content_of(folder) == before


@pytest.mark.proves("our model exported and imported again", "EXACT")
@pytest.mark.parametrize("binary_head", [True, False])
@pytest.mark.parametrize("norm_placement", ["pre", "post"])
def test_our_model_survives_the_way_there_and_back(tmp_path: Path, norm_placement: str, binary_head: bool) -> None:
    config = model_config(norm_placement=norm_placement, binary_head=binary_head)
    tensors = random_tensors(config, kinds=["weight"])
    ours = save(tmp_path / "ours", config, tensors, tokenizer_type="BertWordPieceCase")
    export_to_huggingface(ours, tmp_path / "theirs", ExportOptions(untie=binary_head))
    back = import_from_huggingface(tmp_path / "theirs", tmp_path / "back", ImportOptions(
        model=ModelChoices(make_vocab_size_divisible_by=20)))
    manifest = Checkpoint.open(back.checkpoint).manifest
    found = model_config_from(manifest)
    assert replace(found, seq_length=config.seq_length) == config
    assert manifest.vocabulary == Checkpoint.open(ours).manifest.vocabulary
    assert back.initialized == () and back.left_out == ()
    for name, weight in weights_of(back.out).items():
        rows = config.vocab_size if len(weight) == config.padded_vocab_size else len(weight)
        assert torch.equal(weight[:rows], tensors[f"weight/{name}"][:rows]), name


@pytest.mark.parametrize("architecture", WHOLE_MODELS)
def test_logits_in_double_precision(tmp_path: Path, architecture: str) -> None:
    folder = save_model(tmp_path / "theirs", hf_model(architecture))
    report = import_from_huggingface(folder, tmp_path / "ours", NOT_VERIFIED)
    rows = RandomRows.draw(report.config, 0)
    ours = our_logits(report.config, weights_of(report.out).__getitem__, rows, torch.float64)
    theirs = their_logits(report.config, folder, rows, torch.float64)
    assert ours.sop is not None and theirs.sop is not None
    assert float((ours.mlm - theirs.mlm).abs().max()) < 1e-12 < float(ours.mlm.abs().max())
    assert float((ours.sop - theirs.sop).abs().max()) < 1e-12 < float(ours.sop.abs().max())


def old_layer_norms(name: str) -> str:
    return re.sub(r"(LayerNorm|\.ln)\.(weight|bias)$",
                  lambda match: f"{match[1]}.{'gamma' if match[2] == 'weight' else 'beta'}", name)


def shards(folder: Path, tensors: dict[str, Tensor], ending: str) -> None:
    names = list(tensors)
    parts = {f"part-{index}.{ending}": {name: tensors[name] for name in names[index::3]} for index in range(3)}
    for file, part in parts.items():
        replace_weights(folder, part, file)
    index = "model.safetensors" if ending == "safetensors" else "pytorch_model.bin"
    (folder / f"{index}.index.json").write_text(json.dumps(
        {"metadata": {"total_size": 0}, "weight_map": {name: file for file, part in parts.items() for name in part}}))


def legacy_pickle(folder: Path, tensors: dict[str, Tensor]) -> None:
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)


FILES: dict[str, Callable[[Path, dict[str, Tensor]], None]] = {
    "safetensors shards": lambda folder, tensors: shards(folder, tensors, "safetensors"),
    "pickle": lambda folder, tensors: replace_weights(folder, tensors, "pytorch_model.bin"),
    "pickle of an old PyTorch": legacy_pickle,
    "pickle shards": lambda folder, tensors: shards(folder, tensors, "bin"),
    "gamma and beta": lambda folder, tensors: replace_weights(
        folder, {old_layer_norms(name): tensor for name, tensor in tensors.items()}),
    "bias of the decoder alone": lambda folder, tensors: replace_weights(
        folder, {name.replace("cls.predictions.bias", "cls.predictions.decoder.bias"): tensor
                 for name, tensor in tensors.items()}),
    "everything twice": lambda folder, tensors: replace_weights(folder, {
        **tensors, "cls.predictions.decoder.bias": tensors["cls.predictions.bias"].clone(),
        "cls.predictions.decoder.weight": tensors["bert.embeddings.word_embeddings.weight"].clone(),
        "bert.embeddings.position_ids": torch.arange(20)[None]}),
}


@pytest.mark.parametrize("way", FILES)
def test_all_files_of_one_model_give_the_same_checkpoint(bert: Path, tmp_path: Path, way: str) -> None:
    import_from_huggingface(bert, tmp_path / "expected", NOT_VERIFIED)
    tensors = load_file(bert / "model.safetensors")
    FILES[way](bert, tensors)
    assert (bert / "model.safetensors").exists() == (way in ("gamma and beta", "bias of the decoder alone",
                                                              "everything twice"))
    # transformers 4 cannot load the bias under its second name alone.
    verify = way != "bias of the decoder alone"
    report = import_from_huggingface(bert, tmp_path / "ours", ImportOptions(verify=verify))
    assert ("of the largest logit" in report.verification) == verify
    assert_same(weights_of(report.out), weights_of(tmp_path / "expected"))


def test_an_output_layer_of_its_own_is_kept(tmp_path: Path) -> None:
    model = hf_model("BertForPreTraining", tie_word_embeddings=False)
    head = model.cls.predictions
    head.decoder.bias = torch.nn.Parameter(head.bias.detach().clone())
    folder = save_model(tmp_path / "theirs", model)
    report = import_from_huggingface(folder, tmp_path / "ours", ImportOptions())
    assert report.config.untie_embeddings_and_output_weights
    found = weights_of(report.out)
    assert torch.equal(found["output_layer.weight"][: len(TOKENS)], head.decoder.weight)
    assert "of the largest logit" in report.verification
    export_to_huggingface(report.out, tmp_path / "back", ExportOptions())
    theirs = {"cls.predictions.decoder.bias": head.bias.detach(), **load_file(folder / "model.safetensors")}
    assert_same(load_file(tmp_path / "back" / "model.safetensors"), theirs)


def test_half_precision_becomes_fp32(bert: Path, tmp_path: Path) -> None:
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(bert / "model.safetensors").items()}
    replace_weights(bert, tensors)
    report = import_from_huggingface(bert, tmp_path / "ours", ImportOptions())
    words = weights_of(report.out)["embedding.word_embeddings.weight"][: len(TOKENS)]
    assert torch.equal(words, tensors["bert.embeddings.word_embeddings.weight"].float())


LM_HEAD = ["lm_head.dense.weight", "lm_head.dense.bias", "lm_head.layer_norm.weight", "lm_head.layer_norm.bias",
           "output_layer.bias"]
SENTENCE_HEAD = ["binary_head.weight", "binary_head.bias"]
POOLER = ["pooler.dense.weight", "pooler.dense.bias"]


@pytest.mark.parametrize(("architecture", "lacks"), [
    ("BertModel", LM_HEAD + SENTENCE_HEAD), ("MegatronBertModel", LM_HEAD + SENTENCE_HEAD),
    ("BertForMaskedLM", POOLER + SENTENCE_HEAD), ("MegatronBertForMaskedLM", POOLER + SENTENCE_HEAD),
    ("BertForNextSentencePrediction", LM_HEAD),
])
def test_missing_heads_are_initialised_and_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], architecture: str, lacks: list[str]
) -> None:
    folder = save_model(tmp_path / "theirs", hf_model(architecture))
    assert main(["from-hf", str(folder), str(tmp_path / "ours"), "--seed", "7"]) == 0
    printed = capsys.readouterr().out
    assert "initialised, since the model lacks them" in printed and "of the largest logit" in printed
    assert [line.strip() for line in printed.splitlines() if line.strip() in lacks] == lacks
    found = weights_of(tmp_path / "ours")
    config = model_config_from(Checkpoint.open(locate(tmp_path / "ours")).manifest)
    for name in lacks:
        expected = torch.empty_like(found[name])
        initialize_parameter(expected, name, config, seed=7)
        assert torch.equal(found[name], expected), name


def test_rows_that_pad_the_vocabulary_are_as_in_a_new_model(bert: Path, tmp_path: Path) -> None:
    report = import_from_huggingface(bert, tmp_path / "ours", NOT_VERIFIED)
    assert report.config.padded_vocab_size == 128
    words = weights_of(report.out)["embedding.word_embeddings.weight"]
    expected = torch.empty_like(words)
    initialize_parameter(expected, "embedding.word_embeddings.weight", report.config, seed=1234)
    assert torch.equal(words[len(TOKENS):], expected[len(TOKENS):])
    assert not torch.equal(words[: len(TOKENS)], expected[: len(TOKENS)])


def test_rows_beyond_the_vocabulary_are_left_out(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "theirs", hf_model("BertForPreTraining", vocab_size=len(TOKENS) + 8))
    report = import_from_huggingface(folder, tmp_path / "ours", ImportOptions())
    assert report.left_out == ("8 rows of the word table beyond the vocabulary's 32 entries",)
    assert report.config.vocab_size == len(TOKENS)


@pytest.mark.parametrize("architecture", ["BertForPreTraining", "BertModel", "BertForMaskedLM"])
def test_masked_lm_alone_gives_the_same_logits(tmp_path: Path, architecture: str) -> None:
    folder = save_model(tmp_path / "theirs", hf_model(architecture, type_vocab_size=1))
    report = import_from_huggingface(folder, tmp_path / "ours", ImportOptions(model=ModelChoices(binary_head=False)))
    assert not report.config.binary_head
    assert "of the largest logit" in report.verification
    assert bool(report.left_out) == (architecture != "BertForMaskedLM")
    assert not [name for name in weights_of(report.out) if name.startswith(("pooler", "binary_head"))]


def vocabulary_in_tokenizer_json(folder: Path, *, added: tuple[str, ...] = (), lower_case: bool = False) -> None:
    tokenizer = fast_tokenizer(Vocabulary.from_file(str(folder / "vocab.txt")), lower_case=lower_case)
    tokenizer.add_tokens(list(added))
    tokenizer.save(str(folder / "tokenizer.json"))
    for other in ("vocab.txt", "tokenizer_config.json"):
        (folder / other).unlink()


def test_the_vocabulary_may_be_in_tokenizer_json(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "theirs", hf_model("BertForPreTraining", vocab_size=len(TOKENS) + 2))
    vocabulary_in_tokenizer_json(folder, added=("bert_ds", "pipeline"))
    report = import_from_huggingface(folder, tmp_path / "ours", NOT_VERIFIED)
    assert (report.checkpoint / "vocab.txt").read_text().splitlines() == [*TOKENS, "bert_ds", "pipeline"]
    assert report.vocabulary.tokenizer_type == "BertWordPieceCase"
    assert report.vocabulary.reason == "tokenizer.json: lowercase false"
    assert report.left_out == ()


@pytest.mark.parametrize(("lower_case", "tokens", "expected", "reason"), [
    (True, TOKENS, "BertWordPieceLowerCase", "do_lower_case true"),
    (False, TOKENS, "BertWordPieceCase", "do_lower_case false"),
    (None, TOKENS, "BertWordPieceCase", "capital letters, such as Cat"),
    (None, [token.replace("Cat", "kitten") for token in TOKENS], "BertWordPieceLowerCase", "no entry"),
])
def test_how_text_becomes_tokens(
    tmp_path: Path, lower_case: bool | None, tokens: list[str], expected: str, reason: str
) -> None:
    folder = save_model(tmp_path / "theirs", hf_model("BertForPreTraining"), lower_case=lower_case)
    write_vocabulary_file(folder / "vocab.txt", tokens)
    report = import_from_huggingface(folder, tmp_path / "ours", NOT_VERIFIED)
    assert report.vocabulary.tokenizer_type == expected
    assert reason in report.vocabulary.reason
    assert Checkpoint.open(report.checkpoint).manifest.vocabulary.tokenizer_type == expected


def without(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        del tensors[name]
        replace_weights(folder, tensors)
    return change


def with_tensor(name: str, *shape: int) -> Callable[[Path], None]:
    return lambda folder: replace_weights(
        folder, {**load_file(folder / "model.safetensors"), name: torch.full(shape, 0.5)})


def config_with(**changes: object) -> Callable[[Path], None]:
    return lambda folder: change_config(folder, **changes)


def file_with(name: str, content: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).write_text(content)
    return change


def unreadable_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()


def only_for_tensorflow(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "tf_model.h5")


def lost_shard(folder: Path) -> None:
    shards(folder, load_file(folder / "model.safetensors"), "safetensors")
    (folder / "part-1.safetensors").unlink()


def shard_elsewhere(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../secret.safetensors"}}')


def quantized(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["bert.pooler.dense.weight"] = torch.ones(24, 24, dtype=torch.int8)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(("damage", "message"), [
    (config_with(model_type="roberta"), "model_type=roberta: is no model that is trained here"),
    (config_with(model_type=None), "model_type=None: is no model"),
    (config_with(hidden_act="relu"), "hidden_act=relu: is an activation that is not computed here"),
    (config_with(position_embedding_type="relative_key"), "position_embedding_type=relative_key: is not served"),
    (config_with(is_decoder=True), "is_decoder=True: is not served"),
    (config_with(num_attention_heads=5), "does not divide"),
    (config_with(num_hidden_layers=None), "num_hidden_layers=None: is no size"),
    (config_with(num_hidden_layers=3), "lacks bert.encoder.layer.2.attention.self.query.weight"),
    (config_with(num_hidden_layers=1), "bert.encoder.layer.1.output.dense.weight, which has no place"),
    (config_with(intermediate_size=48), "of shape [40, 24], and its config.json makes that [48, 24]"),
    (config_with(type_vocab_size=3), "give --bert-no-binary-head"),
    (file_with("config.json", "{"), "config.json: is not JSON"),
    (unreadable_config, "config.json: Is a directory"),
    (without("bert.encoder.layer.1.attention.self.key.bias"), "lacks bert.encoder.layer.1.attention.self.key.bias"),
    (without("cls.predictions.transform.dense.weight"), "lacks cls.predictions.transform.dense.weight"),
    (with_tensor("classifier.weight", 2, 24), "holds classifier.weight, which has no place in the model"),
    (with_tensor("embeddings.LayerNorm.gamma", 24), "twice"),
    (with_tensor("cls.predictions.decoder.weight", len(TOKENS), 24), "differs from the word table"),
    (with_tensor("cls.predictions.decoder.bias", len(TOKENS)), "one parameter, with different values"),
    (only_for_tensorflow, "holds tf_model.h5 only"),
    (lost_shard, "part-1.safetensors: is missing"),
    (shard_elsewhere, "names ../secret.safetensors, which is not in the folder"),
    (quantized, "is of type torch.int8"),
    (file_with("model.safetensors", "\x10"), "is no whole safetensors file"),
    (file_with("vocab.txt", "[PAD]\nthe\n"), "lacks [UNK], [CLS], [SEP], [MASK]"),
    (file_with("vocab.txt", "\n".join([*TOKENS, "one more"])), "has 33 entries, and the word table 32 rows"),
    (file_with("tokenizer_config.json", '{"do_lower_case": true, "strip_accents": false}'), "accents kept"),
    (file_with("tokenizer_config.json", '{"tokenizer_class": "RobertaTokenizer"}'), "names the tokenizer Roberta"),
])
def test_bad_input_is_one_message_and_leaves_nothing(
    bert: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[Path], None], message: str
) -> None:
    damage(bert)
    before = content_of(bert)
    assert main(["from-hf", str(bert), str(tmp_path / "ours"), "--no-verify"]) == 2
    told = capsys.readouterr().err
    assert message in told and "Traceback" not in told
    assert [path.name for path in tmp_path.iterdir()] == ["bert"]
    assert content_of(bert) == before


class Command:
    """What its pickle would run."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("pwned",)


def test_a_pickle_is_never_executed(
    bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (bert / "model.safetensors").unlink()
    for zipped in (True, False):
        torch.save({"weight": Command()}, bert / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
        assert main(["from-hf", str(bert), str(tmp_path / "ours")]) == 2
        assert "holds more than tensors, and is not executed" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["bert"]


def test_an_output_is_replaced_on_request_only(bert: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "ours"
    command = ["from-hf", str(bert), str(out), "--no-verify"]
    assert main(command) == 0
    before = content_of(out)
    assert main(command) == 2
    assert "exists already" in capsys.readouterr().err
    assert content_of(out) == before
    assert main([*command, "--force", "--seed", "3"]) == 0
    assert content_of(out).keys() == before.keys()
    for place in ("", "inside"):
        assert main(["from-hf", str(bert), str(bert / place), "--force"]) == 2
        assert "overlaps" in capsys.readouterr().err
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.tex").write_text("years of work")
    assert main(["from-hf", str(bert), str(tmp_path / "thesis"), "--force"]) == 2
    assert "is no earlier output" in capsys.readouterr().err


def test_a_wrong_conversion_is_caught(
    bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The importer is made to believe in another epsilon than config.json says."""
    from bert_ds.convert import hf_source  # noqa: PLC0415

    truth = hf_source.model_config_from_hf

    def with_another_epsilon(*arguments: Any, **named: Any) -> ModelConfig:
        return replace(truth(*arguments, **named), layernorm_epsilon=1e-5)

    monkeypatch.setattr(hf_source, "model_config_from_hf", with_another_epsilon)
    assert main(["from-hf", str(bert), str(tmp_path / "ours")]) == 2
    assert "transformers computes other logits from it" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["bert"]
