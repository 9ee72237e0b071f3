"""Attention on made-up rows: what a backend computes, with its gradients, and what its dropout leaves."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from bert_ds.ops.backends import AttentionBackend, AttentionQuery, Kernel
from bert_ds.ops.local_attention import LOCAL
from bert_ds.ops.rows import RowKind
from bert_ds.random_keys import hash_places, seed_generator

SEQUENCES = 3


def segments(rows: RowKind, B: int, S: int, device: str = "cpu") -> Tensor:
    """Rows of a kind, [B, S]; every second one of padded and packed rows ends in padding, some hold fewer sequences."""
    ids = torch.ones(B, S, dtype=torch.int32, device=device)
    if rows == "packed":
        ids[:, S // 3:] = 2
        ids[::3, S // 2:] = 3
    if rows != "full":
        ids[1::2, S - S // 4:] = 0
    return ids


def attended(query: AttentionQuery, kernel: Kernel, B: int, S: int) -> list[Tensor]:
    """Context and gradients of queries, keys and values, fp32, with nothing where rows are padding."""
    device, dtype = query.device_type, query.dtype
    generator = torch.Generator(device).manual_seed(0)
    shape = (B, S, query.heads, 3, query.head_dim)
    qkv, upstream = (torch.randn(*size, device=device, dtype=dtype, generator=generator)
                     for size in (shape, (B, query.heads, S, query.head_dim)))
    parts = qkv.requires_grad_().unbind(dim=3)
    ids = segments(query.rows, B, S, device)
    q, k, v = (part.transpose(1, 2) for part in parts)
    context = kernel(q, k, v, ids, None)
    real = (ids != 0)[:, None, :, None]
    context = context * real if query.rows != "full" else context
    gradients = torch.autograd.grad(context, parts, upstream)
    return [tensor.detach().float() for tensor in (context, *gradients)]


def formula(query: AttentionQuery, B: int, S: int) -> list[Tensor]:
    """The same by the formula written out, in fp32."""
    return attended(query, LOCAL.build(query), B, S)


def dropped_probabilities(query: AttentionQuery, kernel: Kernel, seed: int, B: int = 4) -> Tensor:
    """What dropout leaves of the probabilities, [B, N, S, S] with S = head_dim: attention that weighs all keys alike,
    over values that are the identity."""
    S, device = query.head_dim, query.device_type
    q = torch.zeros(B, query.heads, S, S, device=device, dtype=query.dtype)
    v = torch.eye(S, device=device, dtype=query.dtype).expand_as(q)
    seed_generator(torch.device(device), seed)
    hashes_BN = hash_places(torch.tensor(seed, dtype=torch.int32, device=device), torch.arange(
        B * query.heads, dtype=torch.int32, device=device).view(B, query.heads))
    layout = torch.stack((q, q, v), dim=3).transpose(1, 2).contiguous()
    q, k, v = (part.transpose(1, 2) for part in layout.unbind(dim=3))
    return kernel(q, k, v, segments(query.rows, B, S, device), hashes_BN)


def serving(backends: tuple[AttentionBackend, ...], query: AttentionQuery) -> list[AttentionBackend]:
    """Those that do not refuse."""
    return [backend for backend in backends if backend.refusal(query) is None]


def without_dropout(query: AttentionQuery) -> AttentionQuery:
    return dataclasses.replace(query, dropout=0.0)
