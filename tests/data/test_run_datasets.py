"""Several nodes that start at once on one index cache, and the command that fills it in advance."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bert_ds import build_index
from bert_ds.data.indexed_dataset import IndexedDatasetWriter
from bert_ds.data.vocabulary import SPECIAL_TOKENS

NODE = """
import hashlib, sys, time
from dataclasses import replace
import numpy as np
from bert_ds.cli.resolve import resolve_run
from bert_ds.data.run_datasets import datasets_of_run
from bert_ds.data.vocabulary import Vocabulary
run = resolve_run(sys.argv[1:], world_size=1).config
vocabulary = Vocabulary.from_file(run.data.vocab_file)
print("ready", flush=True)
sys.stdin.readline()
for _ in range(5):
    datasets = datasets_of_run(run, vocabulary)
    batch = datasets.train.build_batch(np.arange(len(datasets.train)))
print(len(datasets.valid), hashlib.sha256(b"".join(field.tobytes() for field in batch)).hexdigest())
"""


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    vocab_file = tmp_path / "vocab.txt"
    vocab_file.write_text("\n".join([*SPECIAL_TOKENS, *(f"w{number}" for number in range(95))]) + "\n")
    generator = np.random.default_rng(5)
    with IndexedDatasetWriter(f"{tmp_path}/corpus", np.uint16) as writer:
        for _ in range(2000):
            lengths = generator.integers(3, 30, generator.integers(2, 9))
            writer.add_document(generator.integers(5, 100, lengths.sum()), lengths)
    return ["--recipe", "tiny", "--data-path", f"{tmp_path}/corpus", "--vocab-file", str(vocab_file),
            "--data-cache-path", f"{tmp_path}/cache", "--train-iters", "80",
            "--lr-warmup-iters", "10"]


def test_nodes_that_start_at_once_see_the_same_samples(tmp_path: Path, arguments: list[str]) -> None:
    processes = [subprocess.Popen([sys.executable, "-c", NODE, *arguments], stdin=subprocess.PIPE,
                                  stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(4)]
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    results = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, results
    # A warning about a damaged file would mean that one had been seen half-written.
    assert len({out for out, _ in results}) == 1 and {err for _, err in results} == {""}
    names = sorted(path.name for path in (tmp_path / "cache").iterdir())
    assert len(names) == 6 and {name.rpartition(".")[2] for name in names} == {"npy", "json"}

    # Node-local caches: another folder, the same bytes.
    arguments[arguments.index("--data-cache-path") + 1] = f"{tmp_path}/local"
    assert build_index.main(arguments) == 0
    for name in names:
        local, shared = (hashlib.sha256((tmp_path / folder / name).read_bytes()).digest()
                         for folder in ("local", "cache"))
        assert local == shared, name


def test_the_index_is_built_in_advance(tmp_path: Path, arguments: list[str],
                                       capsys: pytest.CaptureFixture[str]) -> None:
    assert build_index.main([*arguments, "--world-size", "4"]) == 0
    out = capsys.readouterr().out
    arrays = sorted((tmp_path / "cache").glob("*.npy"))
    assert len(arrays) == 3 and all(f"wrote {path} (" in out for path in arrays)
    assert json.loads(arrays[0].with_suffix(".json").read_text())["bytes"] == arrays[0].stat().st_size

    assert build_index.main(arguments) == 0
    out = capsys.readouterr().out
    assert "nothing was left to do" in out and "building" not in out

    assert build_index.main([*arguments, "--seq-lenght", "64"]) == 2
    assert "--seq-lenght: is not known" in capsys.readouterr().err
    arguments[arguments.index("--data-path") + 1] = "missing"
    assert build_index.main(arguments) == 2
    assert "missing.idx and missing.bin missing or empty" in capsys.readouterr().err


def test_help_of_build_index_is_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert build_index.main(["--help"]) == 0
    told = capsys.readouterr().out
    assert "python -m bert_ds.build_index" in told
    assert "Pretrains BERT" not in told
