"""What the engine makes and keeps is ordinary, also where a script first asks for it in `torch.inference_mode`.

A tensor that is made in inference mode stays an inference tensor, and no later training step may save one for backward.
So the engine leaves that mode where it makes what it keeps (`Ranks.unfollowed`), and where a wrapped model runs. There
torch also shows a dispatch mode other operations in inference mode, those that it else makes of others. Gradients stay
off.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from shardpass.core.ranks import torch_private


def ordinary_tensors(within: AbstractContextManager[None] | None = None) -> AbstractContextManager[None]:
    """A block whose tensors are no inference tensors.

    Args:
        within: another block to enter first.
    """
    block: AbstractContextManager[None] = nullcontext() if within is None else within
    return _ordinary(block) if torch.is_inference_mode_enabled() else block


@contextmanager
def _ordinary(block: AbstractContextManager[None]) -> Iterator[None]:
    with block, torch.inference_mode(False), torch.no_grad():  # leaving that mode turns gradients on
        yield


def ordinary_views(given: Any) -> Any:
    """`given` itself, or with ordinary tensors on the memory of the inference tensors in it, which may be written to.

    Call it within `ordinary_tensors`, where torch refuses to write into an inference tensor.
    """
    leaves = torch_private.tree_leaves(given)
    return torch_private.tree_map(_ordinary_view, given) if any(map(_is_plain_inference, leaves)) else given


def _is_plain_inference(leaf: Any) -> bool:
    is_plain = type(leaf) is Tensor and leaf.layout == torch.strided
    return is_plain and leaf.is_inference() and not (leaf.is_conj() or leaf.is_neg())


def _ordinary_view(leaf: Any) -> Any:
    if not _is_plain_inference(leaf):
        return leaf
    empty = torch.empty(0, dtype=leaf.dtype, device=leaf.device)
    return empty.set_(leaf.untyped_storage(), leaf.storage_offset(), leaf.size(), leaf.stride())
