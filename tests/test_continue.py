"""One command goes from a public BERT and a text to a model that has learnt from the text."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bert_ds.checkpoint.reader import Checkpoint, locate

ROOT = Path(__file__).resolve().parents[1]
NOUNS = ("river", "stone", "house", "light", "story", "winter", "bird", "garden")
VERBS = ("finds", "tells", "keeps", "leaves")
ENDINGS = ("slowly", "at home", "in the morning", "under the old tree")
SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
FLAGS = ("--fp32", "--micro-batch-size", "8", "--global-batch-size", "16", "--seq-length", "48", "--lr", "5e-3",
         "--train-iters", "120", "--save-interval", "20", "--log-interval", "1", "--eval-interval", "none",
         "--split", "100,0,0", "--num-workers", "1")

transformers = pytest.importorskip("transformers")


def sentence(choose: random.Random) -> str:
    """The verb follows from the subject, and the ending from the verb: there is something to learn."""
    subject = choose.randrange(len(NOUNS))
    verb = subject % len(VERBS)
    return f"The {NOUNS[subject]} {VERBS[verb]} the {choose.choice(NOUNS)} {ENDINGS[verb]}."


def write_text(path: Path) -> None:
    choose = random.Random(1)
    with path.open("w") as out:
        for _ in range(150):
            out.write(json.dumps({"text": " ".join(sentence(choose) for _ in range(10))}) + "\n")


def write_model(folder: Path, model_class: str) -> None:
    """As somebody else would: weights and tokenizer saved by transformers, cased, without a vocab.txt."""
    words = sorted({word.strip(".") for word in " ".join((*NOUNS, *VERBS, *ENDINGS, "The the")).split()})
    tokens = (*SPECIALS, ".", *words)
    torch.manual_seed(0)
    model_type = getattr(transformers, model_class)
    model_type(model_type.config_class(
        vocab_size=len(tokens), hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=64, initializer_range=0.1, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0)).save_pretrained(folder)
    transformers.BertTokenizer(vocab={token: index for index, token in enumerate(tokens)}, do_lower_case=False,
                               ).save_pretrained(folder)


def run(*command: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items()
            if name not in ("RANK", "WORLD_SIZE", "PYTEST_CURRENT_TEST", "CUDA_VISIBLE_DEVICES")}
    own = {"GPUS_PER_NODE": "1", "MASTER_PORT": "29581", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1",
           "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run([str(word) for word in command], env={**kept, **own, **variables}, capture_output=True,
                          text=True, timeout=280, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def losses(runs: Path) -> dict[int, float]:
    records = map(json.loads, (runs / "metrics.jsonl").read_text().splitlines())
    return {record["iteration"]: record["lm_loss"] for record in records}


def loss_in_transformers(folder: Path) -> float:
    """Masked-LM loss on new sentences, their third word hidden: the verb, which follows from the subject."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model: Any = transformers.AutoModelForMaskedLM.from_pretrained(folder).eval()
    choose = random.Random(2)
    batch = tokenizer([sentence(choose) for _ in range(64)], return_tensors="pt", padding=True)
    labels = torch.full_like(batch.input_ids, -100)
    labels[:, 3] = batch.input_ids[:, 3]
    batch.input_ids[:, 3] = tokenizer.mask_token_id
    with torch.no_grad():
        return float(model(**batch, labels=labels).loss)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("model_class", ["BertForPreTraining", "MegatronBertModel"])
def test_a_public_model_learns_from_a_text(tmp_path: Path, model_class: str) -> None:
    model, text, out = tmp_path / "model", tmp_path / "text.jsonl", tmp_path / "out"
    write_model(model, model_class)
    write_text(text)
    command = (ROOT / "recipes" / "continue.sh", model, text, out, *FLAGS)
    interrupted = run(*command, "--exit-interval", "80")
    start = out / "start" / "model" / "iter_0000000"
    assert f"the weights of {start} are loaded" in interrupted.stdout + interrupted.stderr
    first = losses(out / "runs")
    assert max(first) == 80
    run(*command)
    curve = losses(out / "runs")
    assert max(curve) == 120 and {step: curve[step] for step in first} == first, "goes on, and does not start anew"
    before, after = (sum(curve[step] for step in steps) / 5 for steps in (range(1, 6), range(116, 121)))
    assert after < 0.85 * before

    manifest = Checkpoint.open(locate(out / "checkpoints")).manifest
    megatron = "Megatron" in model_class
    assert manifest.config["model"]["norm_placement"] == ("pre" if megatron else "post")
    assert manifest.config["data"]["sentence_task"] == ("order" if megatron else "random_next")
    assert manifest.vocabulary.tokenizer_type == "BertWordPieceCase"
    run(sys.executable, "-m", "bert_ds.convert", "to-hf", out / "checkpoints", out / "export")
    assert "| starts from | the weights of model |" in (out / "export" / "README.md").read_text()
    assert loss_in_transformers(out / "export") < 0.7 * loss_in_transformers(model)


def test_the_dry_run_tells_where_the_model_comes_from(tmp_path: Path) -> None:
    write_model(tmp_path / "model", "BertForPreTraining")
    told = run(ROOT / "recipes" / "continue.sh", tmp_path / "model", tmp_path / "none.jsonl", tmp_path / "out",
               DRY_RUN="1", GPUS_PER_NODE="8").stdout
    assert "Dry run of continue on 8 ranks" in told
    lines = [line.split() for line in told.splitlines()]
    start = str(tmp_path / "out" / "start" / "model" / "iter_0000000")
    for row in (["model.hidden_size", "32", start], ["model.norm_placement", "post", start],
                ["data.vocab_file", f"{start}/vocab.txt", start]):
        assert row in lines
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["start"]


def test_the_script_refuses_half_a_command() -> None:
    done = subprocess.run([ROOT / "recipes" / "continue.sh", "model", "text"], capture_output=True, text=True,
                          check=False)
    assert done.returncode == 2 and "give MODEL TEXT OUT" in done.stderr
