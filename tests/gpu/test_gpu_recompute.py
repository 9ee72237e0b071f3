"""Selective recomputation on a GPU: whatever generator a kernel's dropout draws from, it draws the same again."""

from __future__ import annotations

import pytest
import torch
from tolerances import HALF_KERNEL

from bert_ds.config.model import ATTENTION_BACKENDS, ModelConfig
from bert_ds.errors import ConfigError
from bert_ds.model.bert import BertModel, ComputeSettings, vocabulary_logits
from bert_ds.model.dropout import BatchKey
from bert_ds.parallel.context import ParallelContext

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
B, S = 4, 256


def gradients(device: str = "cuda", **changes: object) -> torch.Tensor:
    """Of a small bf16 model with rope and dropout in attention alone, all in one row."""
    config = ModelConfig(**{**dict(  # type: ignore[arg-type]
        num_layers=2, hidden_size=256, num_attention_heads=4, seq_length=S, max_position_embeddings=S, vocab_size=100,
        make_vocab_size_divisible_by=16, init_method_std=0.1, position_embedding_type="rope", hidden_dropout=0.0,
        attention_dropout=0.1), **changes})
    model = BertModel(config, ParallelContext.single_process(device), ComputeSettings(torch.bfloat16, rows="full"))
    model.initialize(seed=3)
    generator = torch.Generator().manual_seed(1)
    batch = (torch.randint(100, (B, S), generator=generator), torch.randint(2, (B, S), generator=generator),
             torch.ones(B, S, dtype=torch.int32), torch.arange(8).expand(B, 8))
    outputs = model(tuple(tensor.to(device) for tensor in batch), BatchKey(seed=1, step=0, first_row=0))
    vocabulary_logits(outputs, 100).float().tanh().square().sum().backward()
    return torch.cat([parameter.grad.float().flatten() for parameter in model.parameters()
                      if parameter.grad is not None])


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("backend", [name for name in ATTENTION_BACKENDS if name != "auto"])
def test_selective_recomputation_repeats_the_dropout_of_every_backend(backend: str, compiled: bool) -> None:
    torch._dynamo.reset()
    try:
        kept = gradients(attention_backend=backend, compile=compiled)
    except ConfigError as refused:
        pytest.skip(str(refused))
    again = gradients(attention_backend=backend, compile=compiled, recompute_granularity="selective")
    undropped = gradients(attention_backend=backend, compile=compiled, attention_dropout=0.0)
    close = HALF_KERNEL[torch.bfloat16] * kept.norm()
    assert (again - kept).norm() < close
    assert (undropped - kept).norm() > 3 * close
