"""Transformer Engine's DotProductAttention, one of its backends at a time.

Which backend it may use is told by environment variables, as Megatron-LM does: the chosen one is on, the others are
off, so that nothing falls back silently. Dropout draws from the device's generator, which the caller seeds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from torch import Tensor

from bert_ds.compat import (
    attention_switches,
    fp8_autocast,
    import_transformer_engine,
    installed_version,
    set_attention_switches,
    transformer_engine_version,
)
from bert_ds.errors import ConfigError
from bert_ds.ops.backends import (
    BEFORE_AMPERE,
    FP32,
    NO_GPU,
    AttentionBackend,
    AttentionQuery,
    Kernel,
    Limit,
    head_dims,
)
from bert_ds.ops.rows import sequence_boundaries, visible_mask
from bert_ds.ops.te_masks import PACKED_SINCE, hidden_mask, mask_rule

SWITCHES = {"flash": "NVTE_FLASH_ATTN", "fused": "NVTE_FUSED_ATTN", "unfused": "NVTE_UNFUSED_ATTN"}
"""The environment variable of each backend: 1 lets Transformer Engine use it, 0 does not."""


def check_switches(name: str) -> None:
    """Refuses an explicit choice that the environment contradicts; Megatron-LM asserts the same.

    Raises:
        ConfigError: a switch is set to another value than `name` asks for.
    """
    wanted = _switches_for(name)
    for switch, value in attention_switches(wanted).items():
        if value != wanted[switch]:
            raise ConfigError.of(switch, value, f"contradicts model.attention_backend={name}, which sets it to "
                                 f"{wanted[switch]}", f"unset {switch}, or choose auto, which honours it")


def _switches_for(name: str) -> dict[str, str]:
    return {switch: str(int(backend == name)) for backend, switch in SWITCHES.items()}


class _Attend:
    """A kernel: DotProductAttention with and without dropout, called as the rows and the version want it."""

    def __init__(self, backend: str, query: AttentionQuery) -> None:
        te, version = import_transformer_engine(), transformer_engine_version()
        assert version is not None
        self._te, self._query, self._backend = te, query, backend
        self._rule = mask_rule(version, backend)
        self._plain, self._dropping = (
            te.DotProductAttention(query.heads, query.head_dim, attention_dropout=dropout, qkv_format="bshd",
                                   attn_mask_type="no_mask")
            for dropout in (0.0, query.dropout))

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, segment_ids_BS: Tensor, head_hashes_BN: Tensor | None
    ) -> Tensor:
        module = self._plain if head_hashes_BN is None else self._dropping
        # Attention stays in 16 bits; FP8 is for the matrices around it.
        context = fp8_autocast(self._te, enabled=False) if self._query.fp8 else contextlib.nullcontext()
        with context:
            if self._query.rows == "packed" and self._backend != "unfused":
                return self._by_boundaries(module, q, k, v, segment_ids_BS)
            return self._by_mask(module, q, k, v, segment_ids_BS)

    def _by_mask(self, module: Any, q: Tensor, k: Tensor, v: Tensor, segment_ids_BS: Tensor) -> Tensor:
        q_BSND, k_BSND, v_BSND = (part.transpose(1, 2) for part in (q, k, v))
        context_BSH = module(q_BSND, k_BSND, v_BSND, **self._mask_arguments(segment_ids_BS))
        return context_BSH.view(q_BSND.shape).transpose(1, 2)

    def _mask_arguments(self, segment_ids_BS: Tensor) -> dict[str, Any]:
        if self._query.rows == "full":
            return {"attn_mask_type": "no_mask"}
        if self._query.rows == "packed":
            visible = visible_mask(segment_ids_BS, "packed")
            assert visible is not None
            return {"attn_mask_type": "arbitrary", "attention_mask": ~visible}
        assert self._rule is not None
        return {"attn_mask_type": self._rule.mask_type,
                "attention_mask": hidden_mask(segment_ids_BS, self._rule.shape)}

    def _by_boundaries(self, module: Any, q: Tensor, k: Tensor, v: Tensor, segment_ids_BS: Tensor) -> Tensor:
        """All rows as one line of tokens, in which each sequence, and the padding of each row, is a sequence."""
        B, N, S, D = q.shape
        boundaries = sequence_boundaries(segment_ids_BS, self._query.sequences_per_row)
        q_TND, k_TND, v_TND = (part.transpose(1, 2).flatten(0, 1) for part in (q, k, v))
        context_TH = module(q_TND, k_TND, v_TND, qkv_format="thd", attn_mask_type="padding",
                            cu_seqlens_q=boundaries, cu_seqlens_kv=boundaries, max_seqlen_q=S, max_seqlen_kv=S)
        return context_TH.view(B, S, N, D).transpose(1, 2)


def _restricted_to(name: str) -> Callable[[AttentionQuery], Kernel]:
    def build(query: AttentionQuery) -> Kernel:
        set_attention_switches(_switches_for(name))
        return _Attend(name, query)

    return build


def _not_switched_off(name: str) -> Limit:
    switch = SWITCHES[name]

    def reason(query: AttentionQuery) -> str | None:
        is_off = attention_switches([switch]).get(switch) == "0"
        return f"{switch}=0 in the environment switches it off" if is_off else None

    return Limit(f"`{switch}=0`", reason)


def _takes_padding(name: str) -> Limit:
    def reason(query: AttentionQuery) -> str | None:
        version = transformer_engine_version()
        if version is None or query.rows != "padded" or mask_rule(version, name) is not None:
            return None
        return f"Transformer Engine {version} takes no padding mask for it, 1.7 and later do"

    return Limit("padded rows before Transformer Engine 1.7", reason)


def _takes_boundaries(query: AttentionQuery) -> str | None:
    version = transformer_engine_version()
    if version is None or query.rows != "packed" or version >= PACKED_SINCE:
        return None
    return f"Transformer Engine {version} takes no packed rows, {PACKED_SINCE} and later do"


def _fused_packs(query: AttentionQuery) -> str | None:
    if query.rows != "packed" or query.capability is None or (9, 0) <= query.capability < (12, 0):
        return None
    return "cuDNN takes boundaries of sequences on compute capability 9 and 10 only"


def _fused_repeats(query: AttentionQuery) -> str | None:
    if not query.deterministic or query.capability is None or query.capability >= (9, 0):
        return None
    return "cuDNN's backward pass repeats its bits from compute capability 9.0 on"


def _flash_is_installed(query: AttentionQuery) -> str | None:
    return None if installed_version("flash-attn") else "the package flash-attn is not installed"


_BOUNDARIES = Limit(f"packed rows before Transformer Engine {PACKED_SINCE}", _takes_boundaries)

FUSED = AttentionBackend(
    name="fused", build=_restricted_to("fused"),
    kernels={"full": "cuDNN", "padded": "cuDNN, padding mask", "packed": "cuDNN, boundaries of sequences"},
    limits=(NO_GPU, BEFORE_AMPERE, FP32, head_dims(128),
            Limit("`--deterministic-mode` below compute capability 9.0", _fused_repeats),
            Limit("packed rows unless compute capability is 9 or 10", _fused_packs),
            _takes_padding("fused"), _BOUNDARIES, _not_switched_off("fused")))

FLASH = AttentionBackend(
    name="flash", build=_restricted_to("flash"),
    kernels={"full": "flash-attn", "padded": "flash-attn, padding mask",
             "packed": "flash-attn, boundaries of sequences"},
    limits=(NO_GPU, Limit("flash-attn not installed", _flash_is_installed), BEFORE_AMPERE, FP32,
            head_dims(256), _takes_padding("flash"), _BOUNDARIES, _not_switched_off("flash")))

UNFUSED = AttentionBackend(
    name="unfused", build=_restricted_to("unfused"),
    kernels={"full": "Transformer Engine's softmax", "padded": "Transformer Engine's softmax, padding mask",
             "packed": "Transformer Engine's softmax, block-diagonal mask"},
    limits=(NO_GPU, _not_switched_off("unfused")))

LOCAL = AttentionBackend(
    name="local", build=_restricted_to("local"), kernels={},
    refused_rows=dict.fromkeys(("full", "padded", "packed"), "it belongs to model.transformer_impl=local"))
