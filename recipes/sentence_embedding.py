"""Turns sentences into vectors with an exported model, and tells how similar they are.

    python recipes/sentence_embedding.py exports/110m --text "A cat sleeps." --text "A dog rests." --text "Taxes rose."

MODEL comes from `python -m bert_ds.convert to-hf`. A model that was only pretrained has not learnt to compare
sentences: its cosines are all high, and only their order tells something.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

if __name__ == "__main__":
    # For a checkout that is not installed.
    sys.path.append(str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
from torch import Tensor

from bert_ds.checkpoint.files import replace_durably
from bert_ds.cli.command_parser import CommandParser
from bert_ds.convert.exported_model import open_export
from bert_ds.errors import EXIT_DONE, ConfigError, DataError, run_command
from finetuning.training import add_device_flag, choose_device

Pooling = Literal["mean", "cls"]

_LONGEST_TABLE = 12


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    return run_command(lambda: _run(argv))


def _run(argv: Sequence[str] | None) -> int:
    options = _parser().parse_command(argv)
    sentences = [*(options.text or ()), *(() if options.file is None else _lines(options.file))]
    if not sentences:
        raise ConfigError.of("--text", "none", "no sentence is given", "give --text, several times, or --file")
    if options.batch_size < 1:
        raise ConfigError.of("--batch-size", options.batch_size, "must be at least 1", "use 32")
    device = choose_device(options.device)
    tokenizer, model = open_export(options.model, "AutoModel", new_head=True)
    vectors_NH = embed(model.to(device), tokenizer, sentences, pooling=options.pooling, batch_size=options.batch_size)
    if options.output is not None:
        _write(options.output, vectors_NH)
        print(f"wrote {options.output}: {vectors_NH.shape[0]} vectors of {vectors_NH.shape[1]} numbers")
    if len(sentences) <= _LONGEST_TABLE:
        print(describe(sentences, cosines(vectors_NH)))
    return EXIT_DONE


@torch.inference_mode()
def embed(model: Any, tokenizer: Any, sentences: Sequence[str], *, pooling: Pooling, batch_size: int = 32) -> Tensor:
    """Vectors [sentence, hidden] in fp32 on the CPU; what does not fit into the model's positions is cut off.

    pooling: `mean` of the last layer over the tokens that are not padding, or its vector at [CLS].
    """
    vectors = []
    longest = model.config.max_position_embeddings
    for start in range(0, len(sentences), batch_size):
        batch = tokenizer(list(sentences[start:start + batch_size]), padding=True, truncation=True,
                          max_length=longest, return_tensors="pt").to(model.device)
        hidden_BSH = model(**batch).last_hidden_state
        mask_BS1 = batch["attention_mask"].unsqueeze(-1)
        mean_BH = (hidden_BSH * mask_BS1).sum(dim=1) / mask_BS1.sum(dim=1)
        vectors.append((mean_BH if pooling == "mean" else hidden_BSH[:, 0]).cpu())
    return torch.cat(vectors)


def cosines(vectors_NH: Tensor) -> Tensor:
    """Cosine similarities [sentence, sentence]."""
    units_NH = torch.nn.functional.normalize(vectors_NH, dim=1)
    return units_NH @ units_NH.T


def describe(sentences: Sequence[str], similarities: Tensor) -> str:
    """The sentences, numbered, and the table of their similarities."""
    lines = [f"{number}. {sentence}" for number, sentence in enumerate(sentences, start=1)]
    lines.append("   " + "".join(f"{number:>8}" for number in range(1, len(sentences) + 1)))
    for number, row in enumerate(similarities.tolist(), start=1):
        lines.append(f"{number:>3}" + "".join(f"{value:>8.3f}" for value in row))
    return "\n".join(lines)


def _write(path: Path, vectors_NH: Tensor) -> None:
    content = io.BytesIO()
    np.save(content, vectors_NH.numpy())
    try:
        replace_durably(path, content.getvalue())
    except OSError as error:
        raise DataError.of("--output", path, f"cannot be written ({error.strerror})", "choose another path") from error


def _lines(path: Path) -> list[str]:
    try:
        return [line.strip() for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError.of("--file", path, f"cannot be read ({error})", "give a UTF-8 file of a sentence a line"
                           ) from error


def _parser() -> CommandParser:
    parser = CommandParser(prog="sentence_embedding.py",
                           description="Turns sentences into vectors and tells how similar they are.")
    parser.add_argument("model", type=Path, metavar="MODEL", help="folder that `bert_ds.convert to-hf` wrote")
    parser.add_argument("--text", action="append", metavar="TEXT", help="a sentence; may be given several times")
    parser.add_argument("--file", type=Path, metavar="FILE", help="sentences, one a line")
    parser.add_argument("--pooling", choices=("mean", "cls"), default="mean",
                        help="mean over the tokens, or the vector of [CLS] (default: %(default)s)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the vectors as a NumPy array (.npy)")
    parser.add_argument("--batch-size", type=int, default=32, metavar="N", help="default: %(default)s")
    add_device_flag(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
