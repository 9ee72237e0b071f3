"""An export of a checkpoint of several GB takes little memory, from any layout."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from bert_ds.checkpoint.format import FileRecord, rank_file
from bert_ds.checkpoint.parameters import parameter_shapes
from bert_ds.checkpoint.tensor_file import TensorSpec, _header
from bert_ds.checkpoint.writer import TensorSlice
from tests.checkpoint import saved_checkpoints
from tests.checkpoint.saved_checkpoints import TOKENS, Layout, model_config, save

MODEL = model_config(num_layers=14, hidden_size=2048, num_attention_heads=32, ffn_hidden_size=8192, vocab_size=30522,
                     make_vocab_size_divisible_by=128)
GB = 10**9
MEASURED = """
import resource, sys
from bert_ds.convert.__main__ import main
code = main(sys.argv[1:])
assert not {"transformers", "deepspeed"} & set(sys.modules), "imported"
print("peak", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
sys.exit(code)
"""


def sparse_rank_file(folder: Path, rank: int, slices: Iterable[TensorSlice]) -> FileRecord:
    """A rank's file full of zeros that takes no room on the disk; its hash is nobody's."""
    kept = [piece for piece in slices if piece.stop > piece.start]
    specs = [TensorSpec(piece.key, (piece.stop - piece.start,), torch.float32) for piece in kept]
    path = folder / rank_file(rank)
    header = _header(specs, {"format": "pt"})
    with path.open("wb") as file:
        file.write(header)
        file.truncate(len(header) + sum(spec.bytes for spec in specs))
    return FileRecord(path.name, path.stat().st_size, "0" * 64, {piece.key: piece.record for piece in kept})


@pytest.mark.long
@pytest.mark.timeout(900)
def test_an_export_holds_few_tensors_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [*TOKENS, *(f"w{index}" for index in range(MODEL.vocab_size - len(TOKENS)))]
    write = saved_checkpoints.write_vocabulary_file
    monkeypatch.setattr(saved_checkpoints, "write_rank_file", sparse_rank_file)
    monkeypatch.setattr(saved_checkpoints, "write_vocabulary_file", lambda path: write(path, words))
    shapes = {name: record.shape for name, record in parameter_shapes(MODEL).items()}
    tensors = {f"weight/{name}": torch.empty(shape, device="meta") for name, shape in shapes.items()}
    checkpoint = save(tmp_path / "save", MODEL, tensors, layout=Layout(tp=2, pp=2, dp=2))

    done = subprocess.run([sys.executable, "-c", MEASURED, "to-hf", str(checkpoint), str(tmp_path / "out"),
                           "--no-verify", "--max-shard-size", "1GB", "--dtype", "bfloat16"],
                          check=True, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    peak = int(done.stdout.rpartition("peak ")[2])
    largest = max(4 * torch.Size(shape).numel() for shape in shapes.values())
    assert 4 * MODEL.num_parameters > 3 * GB > peak
    assert peak < GB + 3 * largest
    shards = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(shards) == 2
    found: dict[str, list[int]] = {}
    for shard in shards:
        with safe_open(shard, framework="pt") as opened:
            found |= {name: opened.get_slice(name).get_shape() for name in opened.keys()}
    assert found["bert.embeddings.word_embeddings.weight"] == [MODEL.vocab_size, MODEL.hidden_size]
    assert found["bert.encoder.layer.13.attention.self.value.weight"] == [2048, 2048]
