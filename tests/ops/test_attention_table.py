"""The tables of attention in bert_ds/README.md are those of the code."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import bert_ds
from bert_ds.ops.attention import BACKENDS
from bert_ds.ops.backends import AttentionBackend
from bert_ds.ops.rows import ROW_KINDS
from bert_ds.ops.te_masks import MASK_RULES

README = Path(bert_ds.__file__).parent / "README.md"


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |\n"


def kernel_table() -> str:
    """Implementation x backend x rows -> kernel or refusal, in the order in which `auto` tries them."""
    header = ("`transformer_impl`", "`attention_backend`", *ROW_KINDS, "refused with")
    rows = [row(f"`{implementation}`", f"`{backend.name}`", *cells(backend))
            for implementation, backends in BACKENDS.items() for backend in backends]
    return row(*header) + "|---" * len(header) + "|\n" + "".join(rows)


def cells(backend: AttentionBackend) -> Iterator[str]:
    yield from (backend.kernels.get(kind, "refused") for kind in ROW_KINDS)
    reasons = dict.fromkeys(backend.refused_rows.values())
    yield "; ".join([*(limit.when for limit in backend.limits), *reasons]) or "nothing"


def mask_table() -> str:
    """Version of Transformer Engine x backend -> shape and type of the mask of padded rows."""
    header = ("Transformer Engine from", "backends", "mask of padded rows", "`attn_mask_type`")
    rows = [row(str(rule.since), ", ".join(rule.backends), rule.shape, rule.mask_type) for rule in MASK_RULES]
    return row(*header) + "|---" * len(header) + "|\n" + "".join(rows)


def test_the_readme_has_the_tables_of_the_code() -> None:
    text = README.read_text(encoding="utf-8")
    for table in (kernel_table(), mask_table()):
        assert table in text, f"bert_ds/README.md lacks this table:\n{table}"


def test_every_pair_is_a_kernel_or_a_reason() -> None:
    for backends in BACKENDS.values():
        assert {backend.name for backend in backends} == {"fused", "flash", "unfused", "local"}
        for backend in backends:
            assert set(backend.kernels) | set(backend.refused_rows) == set(ROW_KINDS)
            assert not set(backend.kernels) & set(backend.refused_rows)
