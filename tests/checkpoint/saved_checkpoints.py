"""Makes checkpoints as a run of any layout would save them: layers on stages, tensor-parallel pieces, ZeRO's cuts."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from bert_ds.checkpoint.format import (
    KINDS,
    FileRecord,
    LayoutRecord,
    Manifest,
    ParameterRecord,
    VocabularyRecord,
    tag_for,
)
from bert_ds.checkpoint.parameters import parameter_shapes
from bert_ds.checkpoint.run_config import run_config_as_dict
from bert_ds.checkpoint.writer import TensorSlice, commit, prepare_folder, write_rank_file, write_vocabulary
from bert_ds.config.data import DataConfig
from bert_ds.config.engine import EngineConfig
from bert_ds.config.model import ModelConfig
from bert_ds.config.output import OutputConfig
from bert_ds.config.parallel import ParallelConfig
from bert_ds.config.run import RunConfig
from bert_ds.config.schedule import ScheduleConfig

TOKENS = (
    "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "##s", "sat", "on", "mat", "Cat", ".", ",", "a", "b",
    "##b", "cafe", "caf", "##é", "é", "中", "un", "##able", "##ing", "walk", "!", "1", "##2", "'", "s", "dog",
)


@dataclass(frozen=True)
class Layout:
    tp: int = 1
    pp: int = 1
    dp: int = 1


ONE_RANK = Layout()


def model_config(**changes: object) -> ModelConfig:
    """A model of 2 layers; 32 tokens are padded to 40."""
    shape = dict(num_layers=2, hidden_size=24, num_attention_heads=4, ffn_hidden_size=40, seq_length=16,
                 max_position_embeddings=20, vocab_size=len(TOKENS), make_vocab_size_divisible_by=20)
    return ModelConfig(**{**shape, **changes})  # type: ignore[arg-type]


def run_config(model: ModelConfig, tokenizer_type: str = "BertWordPieceLowerCase") -> RunConfig:
    return RunConfig(
        name="unit", model=model, parallel=ParallelConfig(), schedule=ScheduleConfig(train_iters=200),
        data=DataConfig(data_path=("/home/someone/books_text_sentence",), tokenizer_type=tokenizer_type),  # type: ignore
        engine=EngineConfig(micro_batch_size=4, global_batch_size=32, lr=1e-4), output=OutputConfig(),
    )


def random_tensors(config: ModelConfig, seed: int = 0, kinds: Sequence[str] = KINDS) -> dict[str, Tensor]:
    """`{kind}/{name}` -> full tensor; LayerNorm weights around 1 and everything else large enough to matter."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for kind in kinds:
        for name, parameter in parameter_shapes(config).items():
            values = torch.randn(parameter.shape, generator=generator)
            is_norm = "norm" in name and name.endswith("weight")
            tensors[f"{kind}/{name}"] = values * 0.2 + 1.0 if is_norm else values * 0.3
    return tensors


def write_vocabulary_file(path: Path, tokens: Sequence[str] = TOKENS) -> Path:
    path.write_bytes("".join(f"{token}\n" for token in tokens).encode())
    return path


def save(
    save_dir: Path, config: ModelConfig, tensors: dict[str, Tensor], *, step: int = 100, layout: Layout = ONE_RANK,
    tokenizer_type: str = "BertWordPieceLowerCase", keep_last: int | None = None,
) -> Path:
    """Saves `tensors` as `layout` would; returns the folder of the checkpoint."""
    tag = tag_for(step)
    folder = prepare_folder(save_dir, tag)
    vocab_file = write_vocabulary_file(save_dir / "vocabulary-of-the-run.txt")
    vocabulary = write_vocabulary(folder, vocab_file, size=config.vocab_size, tokenizer_type=tokenizer_type)
    records = [write_rank_file(folder, rank, slices)
               for rank, slices in enumerate(slices_of_ranks(config, tensors, layout))]
    manifest = manifest_of(config, step, layout, tokenizer_type, vocabulary, tuple(records))
    return commit(save_dir, tag, manifest, keep_last=keep_last)


def manifest_of(
    config: ModelConfig, step: int, layout: Layout, tokenizer_type: str, vocabulary: VocabularyRecord,
    records: tuple[FileRecord, ...],
) -> Manifest:
    """What a run of made-up numbers says of itself."""
    return Manifest(
        step=step, consumed_samples=32 * step, successful_samples=32 * (step - 1), skipped_steps=1,
        optimizer_step=step - 1, loss_scaler={"cur_scale": 65536.0, "cur_hysteresis": 2},
        config=run_config_as_dict(run_config(config, tokenizer_type)),
        layout=LayoutRecord(layout.tp, layout.pp, layout.dp), versions={"bert_ds": "0.1.0", "torch": torch.__version__},
        vocabulary=vocabulary, metrics={"lm_loss": 3.25, "sop_loss": 0.5, "lm_accuracy": 0.4},
        parameters=parameter_shapes(config), files=records,
    )


def slices_of_ranks(config: ModelConfig, tensors: dict[str, Tensor], layout: Layout) -> Iterator[list[TensorSlice]]:
    """What each rank of `layout` holds."""
    for stage in range(layout.pp):
        for share in range(layout.dp):
            for tp_index in range(layout.tp):
                yield list(slices_of(config, tensors, layout, stage, share, tp_index))


def slices_of(
    config: ModelConfig, tensors: dict[str, Tensor], layout: Layout, stage: int, share: int, tp_index: int
) -> Iterator[TensorSlice]:
    """What the rank (stage, share, tp_index) holds: its share of the flattened pieces of its stage, laid end to end."""
    for kind in dict.fromkeys(key.partition("/")[0] for key in tensors):
        mine = [(name, parameter) for name, parameter in parameter_shapes(config).items()
                if _stage_of(name, layout.pp) == stage and (parameter.cut_dim is not None or tp_index == 0)]
        total = sum(parameter.numel // parameter.pieces(layout.tp) for _, parameter in mine)
        first, last = total * share // layout.dp, total * (share + 1) // layout.dp
        offset = 0
        for name, parameter in mine:
            piece = cut(tensors[f"{kind}/{name}"], parameter, tp_index, layout.tp).flatten()
            start, stop = (min(max(edge - offset, 0), piece.numel()) for edge in (first, last))
            yield TensorSlice(kind, name, tp_index, parameter.pieces(layout.tp), start, stop, piece[start:stop])
            offset += piece.numel()


def cut(full: Tensor, parameter: ParameterRecord, tp_index: int, tp_count: int) -> Tensor:
    """The piece that tensor-parallel rank `tp_index` of `tp_count` holds."""
    return full if parameter.cut_dim is None else full.chunk(tp_count, dim=parameter.cut_dim)[tp_index]


def content_of(folder: Path) -> dict[str, str]:
    """Relative path -> SHA-256 of every file below `folder`."""
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(folder.rglob("*")) if path.is_file()}


def _stage_of(name: str, pp: int) -> int:
    if name.startswith("encoder.layers."):
        return int(name.split(".")[2]) % pp
    return 0 if name.startswith("embedding.") else pp - 1
