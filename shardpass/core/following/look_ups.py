"""Embeddings whose gradient, or whose result, depends on rows of other ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardpass.core.following.user_line import user_line
from shardpass.errors import RefusedError

BAGS = frozenset([torch.ops.aten._embedding_bag, torch.ops.aten._embedding_bag_forward_only])


def check_look_up(func: Any, weight: Tensor, _: Tensor, __: Any = None, scale_grad_by_freq: bool = False) -> None:
    """Refuse an embedding whose gradient depends on other rows; and bags, which die of rows that are made up."""
    if scale_grad_by_freq and weight.requires_grad and torch.is_grad_enabled():
        raise RefusedError(
            f"{user_line()}: an embedding with scale_grad_by_freq=True divides its gradient by how often an index "
            f"occurs among the rows, and a rank counts its own rows only. Leave it out, and divide the rows of the "
            f"weight's gradient by the counts of the whole graph after sync_gradients"
        )
    if func.overloadpacket in BAGS:
        raise RefusedError(
            f"{user_line()}: which rows `embedding_bag` puts together depends on its offsets, so it cannot be "
            f"followed. Use torch.nn.Embedding, and a sum or mean over the dimension of the bag"
        )
