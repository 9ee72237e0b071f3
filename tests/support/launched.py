"""Training as users start it: data made from text, the launcher, the command line, processes that can be killed."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WORDS = ("river", "stone", "walks", "slowly", "green", "house", "under", "bright", "morning", "light", "tells", "old",
         "story", "about", "winter", "birds", "found", "their", "way", "home")


def make_data(folder: Path) -> list[str]:
    """A small corpus with its vocabulary; returns the flags that name both."""
    from bert_ds.preprocess_data import main as preprocess  # noqa: PLC0415

    choose = random.Random(1)
    with (folder / "text.jsonl").open("w") as out:
        for _ in range(120):
            sentences = [" ".join(choose.choices(WORDS, k=choose.randint(3, 9))).capitalize() + "." for _ in range(8)]
            out.write(json.dumps({"text": " ".join(sentences)}) + "\n")
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", *WORDS]
    (folder / "vocab.txt").write_text("".join(f"{token}\n" for token in tokens))
    code = preprocess(["--input", str(folder / "text.jsonl"), "--output-prefix", str(folder / "corpus"),
                       "--vocab-file", str(folder / "vocab.txt"), "--split-sentences"])
    assert code == 0
    return ["--data-path", str(folder / "corpus_text_sentence"), "--vocab-file", str(folder / "vocab.txt"),
            "--split", "80,10,10"]


SMALL = ["--num-layers", "4", "--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "32",
         "--max-position-embeddings", "32", "--micro-batch-size", "2", "--global-batch-size", "16",
         "--lr-warmup-iters", "2", "--eval-iters", "2", "--log-interval", "1", "--num-workers", "1"]


def environment(*, gpu: bool = False) -> dict[str, str]:
    """A user's environment that knows nothing of this checkout."""
    kept = {name: value for name, value in os.environ.items()
            if name not in ("RANK", "WORLD_SIZE", "DS_ACCELERATOR", "PYTEST_CURRENT_TEST")}
    here = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    return {**kept, **here} if gpu else {**kept, **here, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}


def command(ranks: int, arguments: list[str], port: int) -> list[str]:
    """The `deepspeed` launcher on `ranks` ranks of the tiny configuration."""
    launcher = str(shutil.which("deepspeed", path=environment()["PATH"]))
    return [launcher, "--num_gpus", str(ranks), "--master_port", str(port), str(ROOT / "bert_ds" / "pretrain.py"),
            "--deepspeed_config", "ds_configs/tiny.json", *SMALL, *arguments]


def launch(
    ranks: int, arguments: list[str], cwd: Path, *, port: int = 29571, gpu: bool = False
) -> subprocess.CompletedProcess[str]:
    """Runs training to its end from the folder `cwd`, on CPU ranks unless `gpu`."""
    return subprocess.run(command(ranks, arguments, port), cwd=cwd, env=environment(gpu=gpu), capture_output=True,
                          text=True, timeout=280, check=False)


def outputs(folder: Path) -> list[str]:
    """Flags that send everything a run writes into `folder`."""
    return ["--save", str(folder / "checkpoints"), "--load", str(folder / "checkpoints"),
            "--tensorboard-dir", str(folder / "run")]


def records(folder: Path) -> list[dict[str, object]]:
    """The training records of metrics.jsonl, the last one of each iteration."""
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [record for record in map(json.loads, lines) if "split" not in record]
    return list({record["iteration"]: record for record in steps}.values())


def tensor_hashes(folder: Path) -> dict[str, str]:
    """SHA-256 of the tensors of the newest checkpoint that a run wrote into `folder`."""
    from bert_ds.checkpoint.reader import Checkpoint, find_latest  # noqa: PLC0415

    found = find_latest(folder / "checkpoints", verify_hashes=True)
    assert found is not None
    return {file.name: file.sha256 for file in Checkpoint.open(found).manifest.files}
