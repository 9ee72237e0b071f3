"""Which attention kernels run here, and how fast, by implementation and kind of rows.

B rows, S positions, N heads, D head dimension.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor

from bert_ds.compat import transformer_engine_version
from bert_ds.diagnosis.finding import Finding, Settings
from bert_ds.errors import UserError
from bert_ds.ops.attention import BACKENDS
from bert_ds.ops.backends import AttentionBackend, AttentionQuery
from bert_ds.ops.rows import ROW_KINDS, RowKind

ON_GPU, ON_CPU = (16, 512, 16, 64), (2, 128, 4, 64)
"""B, S, N, D of what is timed."""
ROUNDS = 5
CLEARLY_FASTER = 0.8
"""Time of another kernel, as a share of that of the kernel that auto takes, from which on it is worth a word."""


def check_attention(_settings: Settings) -> Sequence[Finding]:
    """One row for each implementation and kind of rows: milliseconds forward and backward, or why a kernel refuses."""
    return [_rows(implementation, rows) for implementation in _implementations() for rows in ROW_KINDS]


def _implementations() -> Iterator[str]:
    yield "local"
    if torch.cuda.is_available() and transformer_engine_version() is not None:
        yield "transformer_engine"


def _query(rows: RowKind) -> AttentionQuery:
    has_gpu = torch.cuda.is_available()
    *_, heads, head_dim = ON_GPU if has_gpu else ON_CPU
    return AttentionQuery(
        rows=rows, heads=heads, head_dim=head_dim, dropout=0.1, sequences_per_row=2 if rows == "packed" else 1,
        device_type="cuda" if has_gpu else "cpu", dtype=torch.bfloat16 if has_gpu else torch.float32,
        capability=torch.cuda.get_device_capability() if has_gpu else None)


def _rows(implementation: str, rows: RowKind) -> Finding:
    query = _query(rows)
    milliseconds: dict[str, float] = {}
    refused: dict[str, str] = {}
    failed: dict[str, str] = {}
    for backend in BACKENDS[implementation]:
        if reason := backend.refusal(query):
            refused[backend.name] = reason
            continue
        try:
            milliseconds[backend.name] = _milliseconds(backend, query)
        except (RuntimeError, UserError, AssertionError, TypeError) as error:
            failed[backend.name] = str(error).strip().splitlines()[0][:160]
    return _judge(f"attention, {rows} rows" + (" (te)" if implementation == "transformer_engine" else ""),
                  milliseconds, refused, failed, is_gpu=query.device_type == "cuda")


def _judge(
    name: str, milliseconds: dict[str, float], refused: dict[str, str], failed: dict[str, str], *, is_gpu: bool
) -> Finding:
    """The row for one kind; the first of `milliseconds` is what auto takes unless it failed."""
    figures: dict[str, Any] = {"ms": milliseconds, "refused": refused, "failed": failed}
    parts = [", ".join(f"{backend} {spent:.2f} ms" for backend, spent in milliseconds.items()) or "no kernel runs"]
    parts += [f"{backend} refuses: {reason}" for backend, reason in refused.items()]
    parts += [f"{backend} fails: {reason}" for backend, reason in failed.items()]
    text = "; ".join(parts)
    if not milliseconds:
        return Finding(check=name, verdict="problem", found=text, figures=figures,
                       repair="set transformer_impl to local" if failed else "use another kind of rows")
    chosen, fastest = next(iter(milliseconds)), min(milliseconds, key=milliseconds.__getitem__)
    if failed:
        return Finding(check=name, verdict="problem", found=text, figures=figures,
                       repair=f"--attention-backend {fastest}")
    if is_gpu and milliseconds[fastest] < CLEARLY_FASTER * milliseconds[chosen]:
        return Finding(check=name, verdict="warning", figures=figures, found=f"{text}; auto takes {chosen}",
                       repair=f"measure a run with --attention-backend {fastest}")
    return Finding(check=name, verdict="fine", found=text, figures=figures)


def _milliseconds(backend: AttentionBackend, query: AttentionQuery) -> float:
    """Median time of a forward and a backward pass with dropout."""
    B, S, N, D = ON_GPU if query.device_type == "cuda" else ON_CPU
    kernel = backend.build(query)
    qkv_BSN3D = torch.randn(B, S, N, 3, D, device=query.device_type, dtype=query.dtype, requires_grad=True)
    upstream_BNSD = torch.randn(B, N, S, D, device=query.device_type, dtype=query.dtype)
    hashes_BN = torch.arange(B * N, dtype=torch.int32, device=query.device_type).view(B, N)
    segment_ids_BS = _segments(query, B, S)

    def both_ways() -> None:
        q, k, v = (part.transpose(1, 2) for part in qkv_BSN3D.unbind(dim=3))
        torch.autograd.grad(kernel(q, k, v, segment_ids_BS, hashes_BN), qkv_BSN3D, upstream_BNSD)

    _timed(both_ways)
    return 1e3 * median(_timed(both_ways) for _ in range(ROUNDS))


def _segments(query: AttentionQuery, B: int, S: int) -> Tensor:
    segments_BS = torch.ones(B, S, dtype=torch.int32, device=query.device_type)
    if query.rows == "packed":
        segments_BS[:, S // 2:] = 2
    if query.rows != "full":
        segments_BS[:, S - S // 8:] = 0
    return segments_BS


def _timed(action: Any) -> float:
    synchronize = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    synchronize()
    started = time.perf_counter()
    action()
    synchronize()
    return time.perf_counter() - started
