"""megatron-core 0.16.1 itself reads what we write, computes the same, and we read what it writes."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_ranks import VERSION, Rows, compute_and_save
from ranks import run_ranks

from bert_ds.checkpoint.reader import Checkpoint, locate
from bert_ds.checkpoint.run_config import model_config_from
from bert_ds.convert.__main__ import main
from bert_ds.convert.verify import RandomRows, our_logits
from tests.checkpoint.saved_checkpoints import Layout, model_config, random_tensors, save

pytestmark = pytest.mark.long

EXACT = 1e-11
SINGLE = 1e-5
"""Megatron's fused GELU has sqrt(2 / pi) to eight digits, and rotary angles are computed in fp32."""


@pytest.fixture(scope="module", autouse=True)
def megatron() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("megatron.core.models.bert",
                            reason=f"needs megatron-core {VERSION}: pip install --no-deps megatron-core=={VERSION}")


@pytest.mark.proves("Megatron core's checkpoints: its logits / weights there and back", "1e-11 (float64)", "EXACT")
@pytest.mark.parametrize(("tp", "pp", "changes"), [
    (1, 1, {}),
    (1, 1, {"binary_head": False, "untie_embeddings_and_output_weights": True}),
    (1, 2, {"position_embedding_type": "rope", "kv_channels": 8, "rotary_percent": 0.5}),
    (2, 1, {"activation": "gelu_tanh", "head_activation": "gelu", "layernorm_epsilon": 1e-3}),
    (2, 2, {}),
], ids=str)
def test_the_same_logits_and_weights(tmp_path: Path, tp: int, pp: int, changes: dict[str, Any]) -> None:
    config = model_config(**{"num_layers": 4, "make_vocab_size_divisible_by": 128, **changes})
    source = save(tmp_path / "save", config, random_tensors(config, kinds=["weight"]), layout=Layout(tp=2, dp=2))
    assert main(["to-megatron", str(source), str(tmp_path / "megatron"), "--transformer-impl", "local",
                 "--tensor-model-parallel-size", str(tp), "--pipeline-model-parallel-size", str(pp)]) == 0
    rows = RandomRows.draw(config, pad_token_id=0)
    results = run_ranks(compute_and_save, tp * pp, config, tmp_path / "megatron" / "iter_0000100",
                        Rows(rows.input_ids, rows.token_type_ids, rows.mask), tmp_path / "again", tp, pp)
    logits, binary = results[-1]

    for form in ("torch", "torch_dist"):
        out = tmp_path / f"from {form}"
        assert main(["from-megatron", str(tmp_path / "again" / form / "iter_0000500"), str(out), "--vocab-file",
                     str(source / "vocab.txt")]) == 0
        before, after = (Checkpoint.open(path) for path in (source, locate(out)))
        for name in before.manifest.parameters:
            assert torch.equal(before.read_full("weight", name), after.read_full("weight", name)), (form, name)
        found = model_config_from(after.manifest)
        assert found == replace(found, **changes)
        ours = our_logits(found, lambda name, after=after: after.read_full("weight", name), rows, torch.float64)
        is_exact = config.activation == "gelu" and config.position_embedding_type == "learned_absolute"
        limit = EXACT if is_exact else SINGLE
        theirs = logits[rows.mask.bool()][:, :config.vocab_size]
        assert ours.mlm.abs().max() > 1
        assert (ours.mlm - theirs).abs().max() < limit
        if binary is not None:
            assert ours.sop is not None
            assert (ours.sop - binary).abs().max() < limit
