"""Lets an exported model guess hidden words: `python -m bert_ds.fill_mask MODEL --text "Returns a [list] of names."`

Words in square brackets are hidden from the model and shown beside its guesses; a plain `[MASK]` hides a word that
nobody knows. The model is loaded by Hugging Face transformers alone, from a folder, without the network.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bert_ds.cli.command_parser import CommandParser
from bert_ds.convert.exported_model import open_export
from bert_ds.errors import EXIT_DONE, ConfigError, run_command

HIDDEN = re.compile(r"\[([^\[\]]+)\]")
MASK = "[MASK]"


@dataclass(frozen=True)
class Guess:
    """What the model puts in place of one hidden token."""

    truth: str | None
    """The token that was hidden; None for a plain [MASK]."""
    candidates: list[tuple[str, float]]
    """Tokens and their probabilities, the likeliest first."""

    @property
    def is_right(self) -> bool:
        return self.truth is not None and self.candidates[0][0] == self.truth


@dataclass(frozen=True)
class Model:
    """An exported model with its tokenizer, as transformers loads them."""

    tokenizer: Any
    masked_lm: Any


def load_model(folder: Path) -> Model:
    """Loads a folder that `python -m bert_ds.convert to-hf` wrote, or any other masked-LM export.

    Raises:
        ConfigError: transformers is not installed, or the folder holds no such model.
    """
    return Model(*open_export(folder, "AutoModelForMaskedLM", new_head=False))


def hide_words(text: str, tokenizer: Any) -> tuple[str, list[str | None]]:
    """The text with every bracketed word replaced by one [MASK] a token, and the hidden tokens in order."""
    hidden: list[str | None] = []

    def mask(match: re.Match[str]) -> str:
        tokens = [None] if match.group() == MASK else tokenizer.tokenize(match.group(1))
        hidden.extend(tokens)
        return " ".join([tokenizer.mask_token] * len(tokens))

    return HIDDEN.sub(mask, text), hidden


def guess(model: Model, text: str, top: int) -> list[Guess]:
    """The `top` likeliest tokens for every hidden token of `text`.

    Raises:
        ConfigError: nothing is hidden in the text, or it is longer than the model's rows.
    """
    import torch  # noqa: PLC0415

    masked, hidden = hide_words(text, model.tokenizer)
    if not hidden:
        raise ConfigError.of("--text", repr(text), "hides no word", "put the words to hide in [square brackets]")
    batch = model.tokenizer(masked, return_tensors="pt")
    longest = model.masked_lm.config.max_position_embeddings
    length = batch["input_ids"].shape[1]
    if length > longest:
        raise ConfigError.of("--text", f"{length} tokens", f"is longer than the model's {longest}", "shorten it")
    places = (batch["input_ids"][0] == model.tokenizer.mask_token_id).nonzero().flatten()
    assert len(places) == len(hidden)
    with torch.inference_mode():
        logits_PV = model.masked_lm(**batch).logits[0, places]
    best = logits_PV.float().softmax(dim=-1).topk(min(top, logits_PV.shape[-1]))
    return [
        Guess(truth, list(zip(model.tokenizer.convert_ids_to_tokens(ids.tolist()), values.tolist(), strict=True)))
        for truth, ids, values in zip(hidden, best.indices, best.values, strict=True)
    ]


def describe(text: str, guesses: Sequence[Guess]) -> str:
    """The text and one line for each hidden token: its guesses with their probabilities, `*` at the true one."""
    lines = [text]
    for number, found in enumerate(guesses, start=1):
        shown = "  ".join(f"{'*' if token == found.truth else ''}{token} {probability:.1%}"
                          for token, probability in found.candidates)
        truth = "?" if found.truth is None else found.truth
        lines.append(f"  {number}. {truth:<14} {'right' if found.is_right else '     '}  {shown}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    return run_command(lambda: _run(argv))


def _run(argv: Sequence[str] | None) -> int:
    parser = CommandParser(
        prog="python -m bert_ds.fill_mask",
        description="Lets an exported model guess the words in [square brackets], loaded by Hugging Face transformers.",
    )
    parser.add_argument("model", type=Path, metavar="MODEL", help="folder of an exported model")
    parser.add_argument("--text", action="append", required=True, metavar="TEXT",
                        help="text with the words to hide in [square brackets]; may be given several times")
    parser.add_argument("--top", type=int, default=5, metavar="N",
                        help="guesses shown for each hidden word")
    options = parser.parse_command(argv)
    if options.top < 1:
        raise ConfigError.of("--top", options.top, "must be at least 1", "use 5")
    model = load_model(options.model)
    for text in options.text:
        print(describe(text, guess(model, text, options.top)))
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
