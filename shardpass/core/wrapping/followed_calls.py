"""Which calls of a model are followed, and what is known of its tensors between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shardpass.core.exchange import node_set
from shardpass.core.following import Around, FollowRows, ForwardDraws, Known
from shardpass.core.graphs import mark_fields, node_embeddings
from shardpass.core.ranks import Ranks, torch_private
from shardpass.core.wrapping.held_rows import HeldRows, followed_for_hooks


class FollowedCalls:
    """Which calls of a model are followed, and what is known of its tensors between them.

    Following costs time for every operation, whatever its size. So only calls whose number is a power of two are
    followed, in each training mode. A model may do something else later, so the first call alone would not do. What is
    made of the results of a call is followed in any case: what they hold is known from the last call that was followed.

    Args:
        is_on: whether any call is followed.
    """

    def __init__(self, is_on: bool) -> None:
        self.is_on = is_on
        self._calls: Counter[Any] = Counter()
        self._follower: FollowRows | None = None
        self._results: dict[Any, tuple[Around, list[Known]]] = {}
        self.knows_order = False
        self.reads_edges: bool | None = None  # in any call that was followed; unknown before the first
        self.held = HeldRows()

    def follow_all(self) -> None:
        """Follow every call from now on."""
        if self._follower is not None:
            self._follower.differentiates = True

    def note_results(self, model: nn.Module, method: str, around: Around, out: Any) -> None:
        """Note what the results `out` of a call that was followed hold."""
        known = [around.marks.known_of(leaf) for leaf in _tensors_in(out)]
        self._results[_kind(model, method)] = around, known
        self.held.find(model, around)
        self.held.follow(around)

    def unfollowed(self, model: nn.Module, method: str, run: Callable[[], Any]) -> tuple[Any, Around | None]:
        """What a call that is not followed gives, and what follows it from there; `None` if no call is followed."""
        kind = _kind(model, method)
        if kind not in self._results:
            return run(), None
        around, known = self._results[kind]
        mark_fields(around.follower, around.comm)
        with followed_for_hooks(model, around):
            out = run()
        tensors = _tensors_in(out)
        for leaf, one in zip(tensors, known) if len(tensors) == len(known) else ():
            around.marks.know(leaf, one)
        self.held.follow(around)
        return out, around

    def next(self, model: nn.Module, comm: Ranks, method: str) -> FollowRows | None:
        """What follows the call of `method` that begins, or `None`."""
        kind = _kind(model, method)
        self._calls[kind] += 1
        is_left_out = self._calls[kind] & (self._calls[kind] - 1)
        if not self.is_on or (is_left_out and not (self._follower and self._follower.differentiates)):
            return None
        follower = self._follower = self._follower or FollowRows(model)
        follower.is_paused = follower.sees_functions = False  # which a backward that failed has left
        follower.draws, follower.ranks = ForwardDraws(comm), comm
        follower.all_agree = lambda mine: all(comm.all_gather_object(mine, "a check of arguments"))
        mark_fields(follower, comm)
        for table in node_embeddings(model).values():
            follower.mark(table.weight, node_set(table.node_type, table.weight.size(0)))
        return follower

    def __deepcopy__(self, memo: dict[int, Any]) -> FollowedCalls:
        return FollowedCalls(self.is_on)  # tensors of another model


def _kind(model: nn.Module, method: str) -> Any:
    return method, model.training, torch.is_grad_enabled()


def _tensors_in(value: Any) -> list[Tensor]:
    return [leaf for leaf in torch_private.tree_leaves(value) if isinstance(leaf, Tensor)]
