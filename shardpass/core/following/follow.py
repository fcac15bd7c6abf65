"""Follows rows of nodes and edges through the operations of a model, and refuses an operation that mixes them.

[Note: what is followed]
A rank holds some rows of every node tensor. What a model does row by row is exact; what puts rows together is exact
only if the engine does it, which knows the rows of other ranks. So while a model runs, each primitive operation on a
tensor with rows must give a row of its result from that row of its operands. A table of kinds of operations says which
do; what is not in it is decomposed by torch, or refused. So nothing depends on the values of the model, or on what a
threshold hides. Gathers and scatters by the numbers of destinations are exact too, because a rank has all in-edges of
its nodes. A model is refused at its first other operation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from shardpass.core.following.draws import ForwardDraws, draws
from shardpass.core.following.look_ups import BAGS, check_look_up
from shardpass.core.following.marks import Marks
from shardpass.core.following.operands import marked_rows, mix, mixture_of, rows_of_operands
from shardpass.core.following.operation import SOFTMAX, VIEWS_IN_PLACE, Operation, needs_values
from shardpass.core.following.origin import Origin
from shardpass.core.following.refusals import MAX_NORM, NUMBERS, SUMS, check_plain, failure, refusal
from shardpass.core.following.row_count import RowCount
from shardpass.core.following.rows import Rows
from shardpass.core.following.user_line import is_asked_by, is_called_by, user_line
from shardpass.core.ranks import Ranks, RowSet, torch_private
from shardpass.errors import RefusedError

_MADE_BY = {torch.ops.aten.arange: Origin.NUMBERS, torch.ops.aten.zeros: Origin.ZEROS}
_EMPTY = frozenset([torch.ops.aten.empty, torch.ops.aten.empty_strided])
_TAKES_NO_SIZES = frozenset(getattr(torch.ops.aten, name) for name in "_to_copy clone copy_ stack cat".split())
"""What C++ calls by itself, as a cast or to put messages together, and what depends on no number that it is given."""
_CHECKS = {torch.ops.aten._is_all_true: ("torch.distributions.",), torch.ops.aten.any: ("torch.nn.functional",)}
"""What code of torch checks the values of its arguments by, and which code."""
_LOSSES = frozenset("cross_entropy binary_cross_entropy binary_cross_entropy_with_logits kl_div".split())
_LOOK_UPS = BAGS | {torch.ops.aten.embedding}


@contextmanager
def unfollowed_anywhere() -> Iterator[None]:
    """A block that nobody follows, neither in a model nor in a message function."""
    with ExitStack() as paused:
        for mode in torch_private.dispatch_modes():
            if isinstance(mode, FollowRows):
                paused.enter_context(mode.paused())
        yield


class FollowRows(torch_private.TorchDispatchMode):
    """While it is on, operations on tensors with rows must treat rows one by one.

    Args:
        model: its parameters and buffers have no rows of nodes or edges.
        beside: follows what runs around this one; they know the same of tensors.
        in_pieces: only some in-edges of a node are here, so that a scatter by their destinations is not the whole sum.

    Attributes:
        marks: what is known of tensors.
        draws: looks after random numbers; `None` inside a message function, where edges have seeds of their own.
        in_known: a module that is known to be exact is running.
        made: the sets whose rows the engine has marked since the last module that is known began.
        is_left_to_another: a message function is running, which another one follows.
        is_paused: what runs now is not followed.
        differentiates: the model takes gradients itself.
        all_agree: whether something is so on all ranks, of which each says whether it is on itself. Collective.
        ranks: on which the model runs, or `None` inside a message function.
        sees_functions: `FollowFunctions` is on, which sees each torch function that Python code calls.
    """

    def __init__(
        self, model: nn.Module | None = None, beside: FollowRows | None = None, in_pieces: bool = False
    ) -> None:
        super().__init__()
        self.in_pieces = in_pieces
        self.marks: Marks = Marks() if beside is None else replace(beside.marks, known=[], refusals=[])
        self.draws: ForwardDraws | None = None
        self.is_paused = self.in_known = self.is_left_to_another = False
        self.made: list[RowSet] = []
        self.sees_functions = self.differentiates = False
        self.all_agree: Callable[[bool], bool] | None = None
        self.ranks: Ranks | None = None
        self._functions = 0
        if model is not None:
            self.marks.note_state(model)

    @contextmanager
    def in_function(self, name: str) -> Iterator[None]:
        """A block that runs one torch function, which `FollowFunctions` was asked for."""
        before = self.marks.is_in_loss
        self.marks.is_in_loss = before or name.endswith("_loss") or name in _LOSSES
        self._functions += 1
        try:
            yield
        finally:
            self._functions -= 1
            self.marks.is_in_loss = before

    def mark(self, tensor: Tensor, of: RowSet, dim: int = 0, points_to: RowSet | None = None) -> None:
        """Say that dimension `dim` of `tensor` holds the rows `of`."""
        of = self.marks.in_full(of)
        self.marks.mark(tensor, Rows(dim % max(1, tensor.dim()), of, points_to=points_to))
        self.made.append(of)

    def recognise(self, value: Any, given: Any = (), is_of_module: bool = False) -> None:
        """Recognise the tensors in `value` by their sizes, which the engine, or a known module, made of `given`."""
        made, sets = self.made[::-1], self.marks.sets_in(given)
        with self.paused():
            self.marks.recognise(value, [*made, *sets] if is_of_module else [*sets, *made])

    def mark_plain(self, tensor: Tensor) -> None:
        """Say that `tensor` holds no rows, whatever its size."""
        self.marks.forget(tensor)
        self.marks.origins[tensor] = Origin.CONSTANT

    def count_of(self, of: RowSet, count: int | None = None) -> RowCount:
        """How many rows of `of` this rank has, or a multiple `count` of that, as code that is followed gets it."""
        return RowCount(of.count if count is None else count, self.marks.in_full(of), self.marks.made_of_counts)

    def note_count(self, count: int) -> None:
        """Note that the model was told the number of own rows as a plain `int`."""
        self.marks.note_count(count)

    def mark_alike(self, tensor: Tensor, like: Tensor) -> None:
        """Say that `tensor` holds the rows that `like` holds, in the same dimension."""
        rows = self.marks.rows.get(like)
        if rows is not None and rows.fit(tensor):
            self.marks.mark(tensor, rows)
        elif like in self.marks.origins:
            self.mark_plain(tensor)

    def row_dim(self, tensor: Tensor) -> int | None:
        """The dimension of `tensor` that holds rows; `None` if none does, or if nobody knows."""
        with self.paused():
            self.marks.recognise(tensor)
        rows = self.marks.rows.get(tensor)
        return None if rows is None else rows.dim

    def copies_in(self, tensor: Tensor) -> int:
        """How many of the rows of `tensor` every rank has, beside rows of its own."""
        rows = self.marks.rows.get(tensor)
        return 0 if rows is None else rows.of.copies

    @property
    def has_mixtures(self) -> bool:
        """Whether a tensor that is alive was made of several rows, so that a message function may use one."""
        return bool(self.marks.mixtures)

    def forget(self, tensor: Tensor) -> None:
        """Know nothing of a tensor any more, because the engine has written into it."""
        self.marks.forget(tensor)

    @contextmanager
    def paused(self, is_paused: bool = True) -> Iterator[None]:
        """A block of the engine's; with ``False``, a block within it that runs code of the model."""
        with self._switched(is_paused or self.in_known):
            yield

    @contextmanager
    def module(self, is_known: bool) -> Iterator[None]:
        """A block that runs a module which is known to be exact, or one of the user's within it."""
        before, self.in_known = self.in_known, is_known
        try:
            with self._switched(is_known):
                yield
        finally:
            self.in_known = before

    def following(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function of the user's which a known module calls, and whose operations are followed."""

        def followed(*args: Any, **kwargs: Any) -> Any:
            with self.module(False):
                out = function(*args, **kwargs)
            self.marks.check_result(out)
            return out

        return followed

    @contextmanager
    def _switched(self, is_paused: bool) -> Iterator[None]:
        """It costs less not to be asked than not to answer, so the mode itself goes off if it is the innermost."""
        before, self.is_paused = self.is_paused, is_paused
        modes = torch_private.dispatch_modes()
        goes = is_paused and bool(modes) and modes[-1] is self
        comes = not is_paused and not any(mode is self for mode in modes)
        if goes:
            super().__exit__(None, None, None)
        if comes:
            super().__enter__()
        try:
            yield
        finally:
            if comes:
                super().__exit__(None, None, None)
            if goes:
                super().__enter__()
            self.is_paused = before

    @contextmanager
    def left_to_another(self) -> Iterator[None]:
        """A block that runs a message function, which another one follows."""
        before, self.is_left_to_another = self.is_left_to_another, True
        try:
            yield
        finally:
            self.is_left_to_another = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.is_paused or self.is_left_to_another:
            return func(*args, **kwargs)
        is_unseen = self.sees_functions and not self._functions
        with self.marks.remembered(), torch_private.DisableTorchFunction() if is_unseen else nullcontext():
            return self._operation(func, args, kwargs, is_unseen)

    def _operation(self, func: Any, args: Any, kwargs: Any, is_unseen: bool) -> Any:
        leaves, structure = torch_private.tree_flatten((args, kwargs))
        rows = rows_of_operands(self.marks, func, leaves, self._functions > 0)
        if rows and is_unseen and not torch_private.is_view(func) and func.overloadpacket not in _TAKES_NO_SIZES:
            self._refuse_unseen(func, rows)
        is_check = rows and func.overloadpacket in _CHECKS and len(leaves) == 1
        if is_check and self.all_agree is not None and is_asked_by(*_CHECKS[func.overloadpacket]):
            return self._agreed(self.all_agree, func, leaves[0])
        mixture = mixture_of(self.marks, leaves)
        if mixture is not None and (rows or needs_values(func)):
            raise mixture.refusal(decides=needs_values(func))
        if self.draws is not None and not rows and needs_values(func) and self._are_drawn(leaves):
            self.draws.check_branch()
        is_seeded = self.draws is not None and draws(func) and self.draws.are_seeded(leaves)
        before = self._copies(leaves, rows) if rows and torch_private.is_mutable(func) else {}
        if rows and func.overloadpacket is torch.ops.aten.embedding_renorm_:
            raise refusal("an embedding with max_norm= rescales the entries that some rows ask for", MAX_NORM)
        if rows and func.overloadpacket in VIEWS_IN_PLACE:
            leaves[0] = leaves[0].view_as(leaves[0])  # as it was
        try:
            out = func(*args, **kwargs)
        except (RuntimeError, IndexError) as error:
            if func.overloadpacket is torch.ops.aten.max and is_called_by(SOFTMAX):
                return leaves[0].new_tensor(-1)  # the largest number of a destination, where this rank has no edges
            raise self.explained(func.overloadpacket.__name__, error, leaves) from error
        outs = [leaf for leaf in torch_private.tree_leaves(out) if isinstance(leaf, Tensor)]
        if is_seeded and rows and self.draws is not None:
            self.draws.refuse_seeded(next(iter(rows.values())).of.name)
        if rows and func.overloadpacket in _LOOK_UPS:
            check_look_up(func, *args[:4])
        if self.draws is not None and rows and any(self._is_drawn_for_all(leaf, rows) for leaf in leaves):
            self.draws.check_common()
        if rows:
            Operation(self.marks, func, leaves, structure, rows, outs, before, self.in_pieces).follow()
        else:
            self._note_origin(func, leaves, outs, is_seeded)
            if mixture is not None:
                may_be_sum = not draws(func) and not self._are_drawn(leaves)
                mix(self.marks, mixture, func, leaves, structure, outs, may_be_sum)
        return out

    def _agreed(self, all_agree: Callable[[bool], bool], func: Any, leaf: Tensor) -> Tensor:
        """What a check of arguments finds on all ranks together, each of which looks at its own rows."""
        is_any = func.overloadpacket is torch.ops.aten.any
        with self.paused():
            found = bool(func(leaf))
            return torch.tensor(not all_agree(not found) if is_any else all_agree(found))

    @staticmethod
    def _refuse_unseen(func: Any, rows: dict[int, Rows]) -> NoReturn:
        """Refuse an operation that no torch function of Python's has called: what sizes it was given is not known."""
        raise RefusedError(
            f"{user_line()}: `{func.overloadpacket.__name__}` on {next(iter(rows.values())).of.name} runs in code that "
            f"torch.jit.script has compiled, or in another library's, where shardpass cannot see what is computed from "
            f"the number of rows. Call it uncompiled, or in a method of the module by its global name"
        )

    def require(self, tensor: Tensor, of: RowSet, is_table: bool = False) -> None:
        """Refuse a tensor that is to have a row for each of `of` along dimension 0, if its rows are made of several.

        Args:
            is_table: it may hold anything without rows, which the message of each edge reads as a whole.
        """
        self.marks.check_result(tensor)
        if self.marks.is_filled(tensor):
            self.recognise(tensor)
        rows, origin = self.marks.rows.get(tensor), self.marks.origins.get(tensor)
        # a table for messages, too; a rank without rows cannot tell
        may_be = of.is_of_edges and rows is not None and (rows.size != of.count or not of.count)
        is_other = rows is not None and rows.of.is_other_than(of) and rows.fit(tensor)
        if rows is not None and is_other and (rows.of.is_of_edges or not may_be):
            raise RefusedError(
                f"{user_line()}: expected a row for each of the {of.name}, found {rows.of.name}"
                f"{' of another relation, or in another order' if rows.of.is_of_edges and of.is_of_edges else ''}"
            )
        if self.in_known:
            return  # a known module made it
        alike = of.is_of_edges or (rows is not None and rows.dim == 0 and rows.of.goes_with(of))
        if rows is not None and rows.fit(tensor) and not alike:  # with edges may go a table, and other lists of them
            raise RefusedError(f"{user_line()}: expected a row for each of the {of.name}, found {rows.of.name}")
        if origin is not None and rows is None and not is_table and tensor.dim() and tensor.size(0) == of.count:
            check_plain(origin, tensor, 0, of)

    def set_of_ids(self, ids: Tensor) -> RowSet:
        """What the rows are that are fetched by node ids of the whole graph. Refuse numbers of own rows."""
        self.marks.check_result(ids)
        self.marks.recognise(ids)
        found = self.marks.rows.get(ids)
        if found is None or not found.fit(ids):
            return RowSet.fetched(ids.size(0))
        if found.points_to is not None:
            raise RefusedError(
                f"{user_line()}: expected node ids of the whole graph, found numbers of rows of this rank. "
                f"graph.node_ids has the id of each own node"
            )
        return found.of

    def explained(self, name: str, error: Exception, leaves: list[Any]) -> Exception:
        """What to raise where an operation on `leaves` failed with `error`; see `failure`."""
        with self.paused():
            self.marks.recognise(leaves)
        rows = marked_rows(self.marks, leaves)
        plain = [leaf for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and i not in rows]
        if 0 in rows and plain and "out of " in str(error):  # the index of a table with rows
            what = f"`{name}` takes rows by numbers that do not come from the graph ({error})"
            return refusal(f"{what}, over the {rows[0].of.name}", NUMBERS)
        with self.paused():
            return failure(name, error, [found.of for found in rows.values()], plain, self.marks.known)

    def mark_whole(self, value: Any) -> None:
        """Say that tensors in `value` are values of all rows, with the gradient of this rank's share of them."""
        for leaf in torch_private.tree_leaves(value):
            if isinstance(leaf, Tensor):
                self.mark_plain(leaf)
                self.marks.whole[leaf] = True

    def is_sum(self, tensor: Tensor) -> bool:
        """Whether `tensor` was summed over own rows; if not, it may be alike on all ranks. Refuse anything else."""
        with self.paused():
            self.marks.recognise(tensor)
        mixture, rows = self.marks.mixtures.get(tensor), self.marks.rows.get(tensor)
        if mixture is not None and not mixture.is_sum:
            raise refusal(f"`{mixture.name}` makes no sum of the {mixture.of.name}", SUMS, mixture.line)
        if rows is not None:
            raise refusal(f"this tensor of shape {[*tensor.shape]} has a row for each of the {rows.of.name}", SUMS)
        if mixture is not None or tensor.numel() != 1:
            return mixture is not None
        return any(bool(tensor == known.count) for known in self.marks.known)

    def check_reduced(self, tensor: Tensor, op: str) -> None:
        """See `RowWatch.check_reduced`."""
        mixture = self.marks.mixtures.get(tensor)
        return self.is_sum(tensor) if mixture is None else mixture.check_reduced(op)  # type: ignore[return-value]

    def refuse_alike(self, tensor: Tensor) -> NoReturn:
        """Refuse to add up what all ranks have alike."""
        raise RefusedError(
            f"{user_line()}: every rank has this tensor of shape {[*tensor.shape]} alike, so its sum over ranks is as "
            f"many times as large. {SUMS}"
        )

    @staticmethod
    def _copies(leaves: list[Any], rows: dict[int, Rows]) -> dict[int, Tensor]:
        """Copies of the operands without rows that an operation may write into, by id."""
        plain = [leaf for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and i not in rows]
        return {id(leaf): leaf.clone() for leaf in plain}

    def _are_drawn(self, leaves: list[Any]) -> bool:
        return any(isinstance(leaf, Tensor) and leaf in self.marks.drawn for leaf in leaves)

    def _is_drawn_for_all(self, leaf: Any, rows: dict[int, Rows]) -> bool:
        """Whether an operand is random, and the same for all rows: a mask of columns, a factor, a step in time."""
        if not self._are_drawn([leaf]):
            return False
        is_index = leaf.dtype == torch.int64  # such as the edges that are kept, from torch.randperm
        return not is_index and not {found.of.count for found in rows.values()}.intersection(leaf.shape)

    def _note_origin(self, func: Any, leaves: list[Any], outs: list[Tensor], is_seeded: bool) -> None:
        if func.overloadpacket in _EMPTY:
            self.marks.origins.update(dict.fromkeys(outs, Origin.EMPTY))
            return
        given = [self.marks.origin_of(leaf) for leaf in leaves if isinstance(leaf, Tensor)]
        if is_seeded:
            given = [Origin.SEEDED]
        elif draws(func) and max(given, default=Origin.CONSTANT) <= Origin.CONSTANT:
            given = [Origin.FREE]
        elif not given:
            given = [_MADE_BY.get(func.overloadpacket, Origin.CONSTANT)]
            if given == [Origin.NUMBERS] and outs[0].numel() not in {known.count for known in self.marks.known}:
                given = [Origin.CONSTANT]
        if func.overloadpacket is torch.ops.aten.expand:  # along which it has no entry for each row
            given = [min(*given, Origin.CONSTANT)]
        is_drawn = given == [Origin.FREE] or self._are_drawn(leaves)
        for out in outs:
            if out not in self.marks.rows:
                self.marks.origins[out] = max(given)
                if is_drawn:
                    self.marks.drawn[out] = True
