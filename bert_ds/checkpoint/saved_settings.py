"""What a run can take from the checkpoint that it loads instead of saying it again."""

from __future__ import annotations

from dataclasses import asdict, replace

from bert_ds.checkpoint.format import VOCABULARY_FILE
from bert_ds.checkpoint.reader import Checkpoint
from bert_ds.checkpoint.run_config import DEFINING, model_config_from
from bert_ds.checkpoint.starting_point import folder_to_start_from
from bert_ds.cli.saved_settings import SavedSettings
from bert_ds.config.output import OutputConfig

_USUAL = ("seq_length", "hidden_dropout", "attention_dropout", "init_method_std")


def saved_settings(output: OutputConfig) -> SavedSettings:
    """The model, sentence task, tokenizer and vocabulary of the checkpoint in `output.load`.

    The size of the vocabulary is left to the vocabulary's file: the checkpoint's copy, unless the run saves into
    the same folder, where checkpoints come and go.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged.
    """
    found = folder_to_start_from(replace(output, save=None))
    assert found is not None, "output.load is set, and no run saves there"
    folder, _ = found
    manifest = Checkpoint.open(folder).manifest
    model = asdict(model_config_from(manifest))
    usual = {f"model.{name}": model[name] for name in _USUAL}
    if (task := (manifest.config.get("data") or {}).get("sentence_task")) is not None:
        usual["data.sentence_task"] = task
    if output.load != output.save:
        usual["data.vocab_file"] = str(folder / VOCABULARY_FILE)
    return SavedSettings(
        origin=str(folder), usual=usual,
        defining={**{f"model.{name}": model[name] for name in DEFINING if name != "vocab_size"},
                  "data.tokenizer_type": manifest.vocabulary.tokenizer_type})
