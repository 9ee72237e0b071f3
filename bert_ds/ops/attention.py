"""Which backend computes attention, and why the others do not; the table in bert_ds/README.md is this one.

`model.transformer_impl` decides whose kernels serve: `local` means PyTorch's, `transformer_engine` its own.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from bert_ds.errors import ConfigError
from bert_ds.ops import local_attention, sdpa_attention, te_attention
from bert_ds.ops.backends import Attention, AttentionBackend, AttentionQuery

log = logging.getLogger(__name__)

BACKENDS: Mapping[str, tuple[AttentionBackend, ...]] = {
    "local": (sdpa_attention.FUSED, sdpa_attention.FLASH, sdpa_attention.UNFUSED, local_attention.LOCAL),
    "transformer_engine": (te_attention.FUSED, te_attention.FLASH, te_attention.UNFUSED, te_attention.LOCAL),
}
"""By `model.transformer_impl`, in the order in which `auto` tries them."""


def choose_attention(name: str, query: AttentionQuery, transformer_impl: str = "local") -> Attention:
    """The backend `name` built for `query`, or the first that serves it for "auto"; logs the choice and each refusal.

    Raises:
        ConfigError: the named backend cannot serve the query, or none can; names the reason and the nearest that can.
    """
    backends = BACKENDS[transformer_impl]
    refusals = {backend.name: backend.refusal(query) for backend in backends}
    serving = [backend for backend in backends if refusals[backend.name] is None]
    refused = "; ".join(f"{other} refused: {reason}" for other, reason in refusals.items() if reason)
    if not serving:
        raise ConfigError.of("model.attention_backend", name, f"nothing serves this run ({refused})",
                             "set model.transformer_impl to local")
    if name != "auto" and refusals[name] is not None:
        raise ConfigError.of("model.attention_backend", name, str(refusals[name]),
                             f"use {serving[0].name}, or auto, which picks it")
    if name != "auto" and transformer_impl == "transformer_engine":
        te_attention.check_switches(name)
    chosen = serving[0] if name == "auto" else next(backend for backend in serving if backend.name == name)
    log.info("attention backend: %s (%s) for %s rows in %s%s", chosen.name, chosen.kernels[query.rows], query.rows,
             str(query.dtype).removeprefix("torch."), f"; {refused}" if refused else "")
    return Attention(chosen.name, chosen.build(query), chosen.draws)
