"""README.md of an export: the run's own facts, and nothing that nobody stated."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from bert_ds.checkpoint.format import Manifest
from bert_ds.config.model import ModelConfig
from bert_ds.convert.hf_model import architecture, hf_config

_ACTIVATIONS = {"gelu": "GELU (exact, erf)", "gelu_tanh": "GELU (tanh approximation)"}
_NORM_PLACEMENTS = {
    "pre": "pre-LN, as in Megatron-LM (LayerNorm before each block, one more after the last layer)",
    "post": "post-LN, as in the original BERT (LayerNorm after each residual)",
}


class _SentenceTask(NamedTuple):
    """What the sentence head was trained for."""

    name: str
    tag: str
    labels: str


_SENTENCE_TASKS = {
    "order": _SentenceTask(
        "sentence order", "sentence-order-prediction",
        "Label 0 of the sentence head means that the two segments are in their original order, label 1 that they were "
        "swapped. It was not trained to recognise a random second segment."),
    "random_next": _SentenceTask(
        "next sentence", "next-sentence-prediction",
        "Label 0 of the sentence head means that the second segment follows the first, label 1 that it is from another "
        "document. It was not trained to recognise swapped segments."),
}


def model_card(
    manifest: Manifest, config: ModelConfig, *, name: str, dtype: str, license_name: str | None, verification: str
) -> str:
    """The text of README.md.

    Args:
        manifest: the checkpoint that was exported.
        config: its model.
        name: what the model is called, the name of its folder.
        dtype: type of the weights in the files.
        license_name: what the owner chose; None leaves the field out.
        verification: result of the comparison with the checkpoint, a sentence.
    """
    task = _SENTENCE_TASKS[(manifest.config.get("data") or {}).get("sentence_task", "order")]
    sections = [
        _front_matter(config, task, license_name),
        f"# {name}\n\nA BERT with {config.num_parameters / 1e6:.1f} million parameters, pretrained with `bert_ds` "
        f"{manifest.versions.get('bert_ds', '')} and loaded as `{architecture(config)}`.",
        "## Use\n\n" + _usage(name),
        "## Model\n\n" + _table(_model_rows(config, manifest, task, dtype)),
        "## Training\n\n" + _table(_training_rows(manifest)),
    ]
    if manifest.metrics:
        rows = ((metric, f"{value:.4g}") for metric, value in manifest.metrics.items())
        sections.append("## Last evaluation\n\n" + _table(rows))
    if config.binary_head:
        sections.append(f"## {task.name.capitalize()}\n\n{task.labels}")
    sections.append(f"## Verification of this export\n\n{verification}")
    return "\n\n".join(sections) + "\n"


def usage_lines(path: str) -> tuple[str, ...]:
    """Python that loads the model from `path`."""
    return (
        "from transformers import AutoModelForMaskedLM, AutoTokenizer",
        f"tokenizer = AutoTokenizer.from_pretrained({path!r})",
        f"model = AutoModelForMaskedLM.from_pretrained({path!r})",
    )


def _usage(path: str) -> str:
    lines = (
        *usage_lines(path),
        'inputs = tokenizer("This is a [MASK] sentence.", return_tensors="pt")',
        "logits = model(**inputs).logits",
        "position = (inputs.input_ids[0] == tokenizer.mask_token_id).nonzero().item()",
        "print(tokenizer.convert_ids_to_tokens(logits[0, position].topk(5).indices))",
    )
    return "\n".join(("```python", *lines, "```"))


def _front_matter(config: ModelConfig, task: _SentenceTask, license_name: str | None) -> str:
    model_type = hf_config(config, pad_token_id=0, dtype="", untie=False)["model_type"]
    tags = [model_type, "masked-lm", *([task.tag] if config.binary_head else [])]
    lines = ["---", "library_name: transformers", "pipeline_tag: fill-mask"]
    lines += [f"license: {license_name}"] if license_name else []
    return "\n".join([*lines, "tags:", *(f"- {tag}" for tag in tags), "---"])


def _model_rows(
    config: ModelConfig, manifest: Manifest, task: _SentenceTask, dtype: str
) -> Iterator[tuple[str, object]]:
    lower_case = manifest.vocabulary.tokenizer_type == "BertWordPieceLowerCase"
    yield "layers x hidden size x heads", f"{config.num_layers} x {config.hidden_size} x {config.num_attention_heads}"
    yield "feed-forward width", config.ffn_size
    yield "positions", config.max_position_embeddings
    yield "LayerNorm", f"{_NORM_PLACEMENTS[config.norm_placement]}; epsilon {config.layernorm_epsilon:g}"
    yield "activation", f"{_ACTIVATIONS[config.activation]}, in the feed-forward layers and the head"
    yield "heads", f"masked LM and {task.name}" if config.binary_head else "masked LM only; no token types"
    yield "tokenizer", f"WordPiece, {'lower-cased, accents stripped' if lower_case else 'cased'}"
    yield "vocabulary", f"{config.vocab_size} entries, SHA-256 {manifest.vocabulary.sha256}"
    yield "weights", dtype


def _training_rows(manifest: Manifest) -> Iterator[tuple[str, object]]:
    """What the checkpoint's configuration tells; one that was not made by training may lack whole sections."""
    config = manifest.config
    data, engine, schedule = (config.get(section) or {} for section in ("data", "engine", "schedule"))
    row_length = config["model"].get("seq_length")
    yield "recipe" if schedule else "name", config.get("name")
    yield "starts from", _starting_point(config)
    # Only the last part of the path: the folders above it are nobody's business.
    prefixes = data.get("train_data_path") or data.get("data_path", ())
    yield "data", ", ".join(Path(prefix).name for prefix in prefixes)
    yield "split (train, validation, test)", data.get("split")
    yield "masked share", data.get("mask_prob")
    yield "iterations", f"{manifest.step} ({manifest.skipped_steps} skipped by loss scaling)"
    yield "rows read", f"{manifest.consumed_samples} of up to {row_length} tokens"
    yield "global batch", engine.get("global_batch_size")
    yield "precision", engine.get("precision")
    if engine:
        yield "optimizer", (f"AdamW, peak learning rate {engine['lr']:g}, betas {tuple(engine['betas'])}, epsilon "
                            f"{engine['eps']:g}, weight decay {engine['weight_decay']:g}, gradient clipping "
                            f"{engine['gradient_clipping']:g}")
    if schedule:
        yield "schedule", f"{schedule['lr_decay_style']}, minimum {schedule['min_lr']:g}, seed {schedule['seed']}"
    layout = manifest.layout
    yield "layout", (f"{layout.world_size} ranks: tensor {layout.tensor_parallel} x pipeline "
                     f"{layout.pipeline_parallel} x data {layout.data_parallel}")


def _starting_point(config: Mapping[str, Any]) -> str | None:
    """What the weights were before this training, by the last part of its path."""
    output, origin = (config.get(section) or {} for section in ("output", "origin"))
    if output.get("finetune"):
        return f"the weights of {Path(output['load']).name}"
    folder = origin.get("folder")
    return f"{Path(folder).name}, converted from {origin.get('format')}" if folder else None


def _table(rows: Iterable[tuple[str, object]]) -> str:
    lines = [f"| {name} | {str(value).replace('|', ' ')} |" for name, value in rows if value not in (None, "")]
    return "\n".join(("| | |", "|---|---|", *lines))
