"""What the rows of a batch hold, and who may see whom in them.

B batch, S sequence. A row's `segment_ids_BS` say which sequence each position belongs to (0 = padding). Three kinds:
  full    nothing is padded, attention needs no mask
  padded  one sequence a row: keys that are padding are hidden
  packed  several sequences a row: a position sees its own sequence only (block diagonal)
The kind is fixed for a run, never read off the data.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

RowKind = Literal["full", "padded", "packed"]
ROW_KINDS: tuple[RowKind, ...] = get_args(RowKind)


def visible_mask(segment_ids_BS: Tensor, rows: RowKind) -> Tensor | None:
    """Which keys a query may see: None (all), [B, 1, 1, S] for padded rows, [B, 1, S, S] for packed ones; bool.

    Padding positions of packed rows see each other, so that no row of the mask is empty.
    """
    if rows == "full":
        return None
    if rows == "padded":
        return (segment_ids_BS != 0)[:, None, None, :]
    return segment_ids_BS[:, None, :, None] == segment_ids_BS[:, None, None, :]


def sequence_boundaries(segment_ids_BS: Tensor, sequences_per_row: int) -> Tensor:
    """Where the sequences of packed rows begin and end among all B x S tokens: [B x (M + 1) + 1] int32, ascending.

    Every row counts M sequences and its padding, which is last, so that the shape does not depend on the data; what a
    row does not have is empty.
    """
    B = segment_ids_BS.size(0)
    places_BS = (segment_ids_BS.long() - 1) % (sequences_per_row + 1)
    lengths = torch.zeros(B, sequences_per_row + 1, dtype=torch.int32, device=segment_ids_BS.device)
    lengths.scatter_add_(1, places_BS, torch.ones_like(places_BS, dtype=torch.int32))
    ends = lengths.flatten().cumsum(dim=0, dtype=torch.int32)
    return torch.cat((ends.new_zeros(1), ends))
