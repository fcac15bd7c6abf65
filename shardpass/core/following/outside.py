"""Following goes on around the model: what is made of its results, and of the fields of graphs, until backward.

A call of a model returns tensors of a class whose operations come here. On several ranks a script gets the fields of
graphs in that form too. Operations run on plain tensors, and are judged as those within a model are. A rank may look at
what it made of its own rows, as scripts do to print it. So what would be refused in a model is only noted here, and
raised when backward comes to it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from shardpass.core.following.followed_output import FollowedOutput, named
from shardpass.core.following.functions import ADDS, READS, FollowFunctions
from shardpass.core.following.gradients import follow_function, gradients_around, watch_gradients
from shardpass.core.following.marks import Marks
from shardpass.core.following.own_counts import OwnCounts
from shardpass.core.following.own_numbers import own_number
from shardpass.core.following.refusals import (
    Mixture,
    added_by_rows,
    counts_for_each_rank,
    counts_once,
    own_gradient,
    plain_length,
    raise_in_backward,
    refuse_own_graph,
    weighed_in_model,
    whole_already,
)
from shardpass.core.following.row_count import OwnCount, OwnShape, leaves_of
from shardpass.core.following.rows import Rows
from shardpass.core.following.user_line import is_asked_by, user_line
from shardpass.core.following.writes import written_by
from shardpass.core.ranks import (
    Gives,
    Ranks,
    RowSet,
    has_raw_parameter,
    is_made_of_parameters,
    plain_of,
    torch_private,
)
from shardpass.errors import RefusedError

_ADDS_ROWS: frozenset[Gives] = frozenset(("whole", "total", "alike"))
_ADDS_ROWS_INTO = frozenset("index_add_ scatter_add_ scatter_reduce_ index_reduce_".split())
_LOOKS_UP = frozenset("__getitem__ index_select gather embedding take_along_dim".split())
_TAKES_DTYPE = frozenset(["to", "type_as"])
_SHOWS = frozenset(["__repr__", "__format__"])
_SAME_OF_ALL = frozenset("device dtype is_cuda is_leaf is_quantized is_sparse layout ndim requires_grad".split())
"""Attributes that say nothing of rows."""
_COUNTS = frozenset(["size", "numel", "nelement"])
_RUNS_AS_IT_IS = _SHOWS.union(["__deepcopy__", "__reduce_ex__"])


class Around:
    """Follows what is made of the results of some calls, or of the fields of all graphs.

    Args:
        functions: followed the last of these calls that was followed.
        comm: the ranks.
    """

    def __init__(self, functions: FollowFunctions, comm: Ranks) -> None:
        self.comm, self.functions = comm, functions
        self.follower, self.marks = functions.follower, functions.follower.marks
        self._warned: set[str] = set()

    def tell(self, marks: Marks, tensor: Tensor) -> None:
        """Tell the `marks` of another model what is known of `tensor`."""
        if marks is not self.marks:
            marks.adopt_from(self.marks, tensor)

    def followed(self, value: Any, like: Any = None) -> Any:
        """`value` with tensors that are followed in the place of its tensors.

        Args:
            like: tensors of which those of `value` are other names.
        """
        for leaf, known in zip(leaves_of(value), leaves_of(like)) if like is not None else ():
            if isinstance(leaf, Tensor) and isinstance(known, Tensor):
                self.follower.mark_alike(leaf, known)
                if known in self.marks.whole:
                    self.marks.whole[leaf] = True
        if like is not None:
            self.marks.recognise(value, is_given=True)
        return torch_private.tree_map(self._named, value, is_leaf=lambda one: isinstance(one, torch.Size))

    def returned(self, value: Any, gives: Gives) -> Any:
        """See `ResultWatch.returned`."""
        if gives == "number":
            return value
        if gives in ("whole", "total", "replicated"):
            self.follower.mark_whole(value)
        elif gives == "rows":
            with self._around():
                self.follower.recognise(value)
        else:
            for one in _tensors_in(value):
                self.follower.mark_plain(one)
        return self.followed(value)

    def check_given(self, value: Any, gives: Gives | None = None) -> None:
        """See `ResultWatch.check_given`."""
        of_models = [leaf for leaf in _tensors_in(value) if isinstance(leaf, FollowedOutput)]
        for leaf in of_models:
            leaf.around.tell(self.marks, leaf.plain)
        given = torch_private.tree_map(plain_of, value)
        tensors = _tensors_in(given)
        if (refused := self._refused_in(tensors)) is not None:
            raise refused
        if gives is None:
            self.marks.check_result(given)
            if any(one.requires_grad and one in self.marks.whole for one in tensors):
                raise weighed_in_model(user_line())
        elif gives != "sum":
            self.marks.check_result([] if gives == "replicated" and self._are_sums_of_fetched(tensors) else given)
            if gives == "replicated" and any(one in self.marks.whole for one in tensors):
                raise counts_once(user_line())
            if gives in _ADDS_ROWS and any(one.requires_grad and one in self.marks.whole for one in tensors):
                raise whole_already(user_line())
            if gives in ("total", "alike") and any(self.functions.is_alike(leaf.plain) for leaf in of_models):
                raise counts_for_each_rank(user_line())
        else:
            if (alike := next((leaf for leaf in of_models if self.functions.is_alike(leaf.plain)), None)) is not None:
                self.follower.refuse_alike(alike.plain)
            for one in tensors:
                is_alike = has_raw_parameter(one) if self.follower.is_sum(one) else is_made_of_parameters(one)
                if is_alike or one in self.marks.whole:
                    self.follower.refuse_alike(one)

    def reduced(self, given: Tensor, op: str, reduce: Callable[[Tensor], Tensor]) -> Tensor:
        """See `ResultWatch.reduced`."""
        tensor = plain_of(given)
        if op == "sum" and (refused := self._refused_in([tensor])) is not None:
            raise refused
        if (mixture := self.marks.mixtures.get(tensor)) is not None:
            mixture.check_reduced(op)
        return reduce(tensor)

    def met(self, value: Tensor) -> Tensor:
        """See `ResultWatch.met`."""
        if self.comm.met is not None:
            self.comm.met.append(self)
        elif self.comm.forward is None:
            return value
        self.check_given(value, "rows")
        return plain_of(value)  # type: ignore[no-any-return]

    def _named(self, leaf: Any) -> Any:
        if type(leaf) is not Tensor or leaf.layout is not torch.strided:
            return leaf
        return named(leaf, self)

    def note_function(self, out: Tensor, plain: Tensor, like: Tensor | None) -> None:
        """Note that a `torch.autograd.Function` has returned `out`, whose other name is `plain`.

        Args:
            like: what has the same rows, if that is known.
        """
        with self._around():
            self.follower.recognise(plain) if like is None else self.marks.copy(plain, like)
        follow_function(self.follower, self.functions.block, out, self.marks.rows_of(plain))

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What a torch function returns for arguments of which some are followed."""
        if self.comm.forward is not None:  # a model holds it, and its operations are followed as all of its own
            return func(*torch_private.tree_map(plain_of, args), **torch_private.tree_map(plain_of, kwargs))
        name = getattr(func, "__name__", "")
        of = getattr(func.__self__, "__name__", "") if name == "__get__" else ""
        if of in _SAME_OF_ALL:
            return func(args[0].plain)
        if of == "grad_fn":
            with torch_private.DisableTorchFunctionSubclass():
                if args[0].plain.is_leaf:
                    return None
                return func(*args)  # what a Function has returned has another one than the tensor that it stands for
        tensors = [leaf for leaf in leaves_of((args, [*kwargs.values()])) if isinstance(leaf, Tensor)]
        outputs = leaves_of((args[:1], kwargs.get("outputs")))
        roots = [plain_of(one) for one in outputs if isinstance(one, FollowedOutput)]
        near = self._sets_of_followed(tensors)
        target = written_by(name, args, kwargs)
        is_own = bool(args) and type(args[0]) is Tensor
        at = self._rows_put_at(name, args)
        args, kwargs = torch_private.tree_map(_plain_operand, (args, kwargs))
        if is_own and name in _TAKES_DTYPE:
            return func(*args, **kwargs)
        if name == "backward" or func is torch.autograd.grad:
            return self._differentiated(func, args, kwargs, roots)
        if name in _RUNS_AS_IT_IS:
            return self._as_it_is(func, name, args, kwargs)
        given = _tensors_in(args, kwargs)
        is_new = at is not None and at.points_to and is_asked_by("torch_geometric.")
        if any(type(one) is Tensor for one in leaves_of(target)) and not is_new:  # PyG returns what it adds to zeros
            return self._written(func, name, args, kwargs, near, target, at)
        if name == "bincount":
            return self._counted(func, args, kwargs)
        if name == "contiguous" and any(of.root for of in self.marks.sets_in(given)):
            refuse_own_graph()
        if (refused := self._refused_in(given)) is None:
            try:
                return self._judged(func, name, args, kwargs, given, near)
            except RefusedError as error:
                refused = error.with_traceback(None)
                if target is not None:  # it may have been carried out
                    raise
        elif target is not None:
            raise refused
        return self._refused(func, name, args, kwargs, refused)

    def _as_it_is(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        mixture = self.marks.mixtures.get(args[0]) if name in _SHOWS else None
        if mixture is not None:
            self._warn(self.marks.refused.get(args[0]) or mixture.refusal())
        out = func(*args, **kwargs)
        return self.followed(out, args[0]) if name == "__deepcopy__" else out

    def _refused(self, func: Any, name: str, args: Any, kwargs: Any, refused: RefusedError) -> Any:
        """What a function returns whose result may be looked at, and not differentiated."""
        try:
            out = func(*args, **kwargs)
        except (RuntimeError, IndexError) as error:  # as on a rank that has no rows
            raise refused from error
        if isinstance(out, torch.Size) or (type(out) is int and name in _COUNTS):
            return own_number(out)
        for one in (found := _tensors_in(out)):
            self.marks.refused[one] = refused
            raise_in_backward(one, refused)
        if not found and (name in READS or not self._refused_in(_tensors_in(args, kwargs))):
            if isinstance(out, int):
                self.comm.caches.of(OwnCounts).counts.add(out)
            self._warn(refused)
        return self.followed(out)

    def _sets_of_followed(self, tensors: list[Tensor]) -> list[RowSet]:
        """The sets of rows that the followed ones of `tensors` hold, of which all is noted that is known."""
        followed = [one for one in tensors if isinstance(one, FollowedOutput)]
        for one in followed:
            one.around.tell(self.marks, one.plain)
        self.marks.has_alike = any(self.functions.is_alike(one.plain) for one in followed)
        self.marks.has_raw_parameter = any(
            has_raw_parameter(one) for one in tensors if not isinstance(one, FollowedOutput)
        )
        plain = [one.plain for one in followed]
        with self._around():
            self.marks.recognise(plain, is_given=True)
        sets = self.marks.sets_in(plain)
        watch_gradients(tensors, sets, lambda: self._warn(own_gradient(user_line()), "gradient"))
        return sets

    def _counted(self, func: Any, args: Any, kwargs: Any) -> Any:
        """``torch.bincount`` of own rows, which is a sum over them, though no operation of the table."""
        self.check_given((args, kwargs), "rows")
        out, sets = func(*args, **kwargs), self.marks.sets_in((args, kwargs))
        if sets:
            self.marks.mixtures.add(out, Mixture("bincount", user_line(), sets[0], is_sum=True))
        return self.followed(out)

    def _rows_put_at(self, name: str, args: Any) -> Rows | None:
        """The rows whose values, such as labels or ``edge_index[1]``, say where something is written or added."""
        index = args[1:2] if name == "__setitem__" else args[2:3] if name in _ADDS_ROWS_INTO else ()
        if not index or not isinstance(index[0], FollowedOutput) or index[0].dtype == torch.bool:
            return None
        rows = self.marks.rows_of(index[0].plain)
        return None if rows is None or (name == "__setitem__" and rows.points_to is not None) else rows

    def _written(
        self, func: Any, name: str, args: Any, kwargs: Any, near: list[RowSet], target: Any, at: Rows | None
    ) -> Any:  # fmt: skip
        """What a function returns that writes into a tensor of a script's own, which is not followed after it."""
        self.check_given(given := _tensors_in(args, kwargs), "rows")
        if at is not None:
            raise added_by_rows(user_line(), at)
        if torch.is_grad_enabled() and any(one.requires_grad for one in given):
            raise RefusedError(
                f"{user_line()}: results of a model are written into a tensor that is not made of them, where nobody "
                f"follows their gradients. Make a new one of them, as torch.cat, torch.where and torch.stack do"
            )
        if name == "__setitem__":  # rows go where the script says, as by their ids
            return func(*args, **kwargs)
        out = self._judged(func, name, args, kwargs, given, near)
        self.marks.check_result((plain_of(out), target))  # which the script, or a norm, holds
        return out

    def _differentiated(self, func: Any, args: Any, kwargs: Any, roots: list[Tensor]) -> Any:
        """What ``backward`` or ``torch.autograd.grad`` of the followed `roots` returns. Refuse what may not be."""
        if (refused := self._refused_in(roots)) is not None:
            raise refused
        if any(map(self.functions.is_alike, roots)):
            raise counts_for_each_rank(user_line())
        return gradients_around(func, args, kwargs, roots, self.marks, self.comm, self.followed)

    def _judged(
        self, func: Any, name: str, args: Any, kwargs: Any, given: list[Tensor], near: list[RowSet]
    ) -> Any:  # fmt: skip
        sums = self._sums_in(given) if name in ADDS else None
        if self.comm.size > 1:
            self.comm.caches.of(OwnCounts).check(name, args, self.marks)
        if any(type(one) not in (Tensor, nn.Parameter) for one in given):
            self.marks.check_result(given)  # what the engine has made, such as the numbers of nodes, knows its rows
            out = func(*args, **kwargs)
            self._mark_made(name, out, given)
        else:
            with self._block(near):
                out = func(*args, **kwargs)
        if name == "__len__":
            self.comm.caches.of(OwnCounts).counts.add(out)
            self._warn(plain_length(user_line()), of=name)
        for one in _tensors_in(out):
            mixture = self.marks.mixtures.get(one)
            if mixture is not None and sums is not None:
                self.marks.mixtures.add(one, replace(mixture, is_sum=True))  # what is added has no part in gradients
            elif mixture is not None and not mixture.is_sum:
                raise_in_backward(one, mixture.refusal())
        return self.followed(self._without_counts(out))

    @contextmanager
    def _around(self) -> Iterator[None]:
        marks = self.marks
        before, marks.is_around = marks.is_around, self.comm.forward is None
        if marks.is_around:
            self.follower.all_agree = bool  # a script may let one rank alone do something
        try:
            yield
        finally:
            marks.is_around = before

    def holds_rows(self, tensor: Tensor) -> bool:
        """Whether `tensor` is known to hold rows, or a value of all rows."""
        return self.marks.rows_of(tensor) is not None or tensor in self.marks.whole

    @contextmanager
    def _block(self, near: list[RowSet]) -> Iterator[None]:
        self.marks.near = near
        try:
            with self._around(), self.functions.block():
                yield
        finally:
            self.marks.near = None
            self.marks.refusals.clear()  # which are noted on what was made

    def _refused_in(self, tensors: list[Tensor]) -> RefusedError | None:
        return next((self.marks.refused[one] for one in tensors if one in self.marks.refused), None)

    def _sums_in(self, tensors: list[Tensor]) -> list[Mixture] | None:
        """The sums over own rows among `tensors`; `None` if there are none, or single rows or other mixtures beside."""
        found = [mixture for one in tensors if (mixture := self.marks.mixtures.get(one)) is not None]
        alone = all(self.marks.rows_of(one) is None for one in tensors) and all(mixture.is_sum for mixture in found)
        return found if found and alone else None

    def _are_sums_of_fetched(self, tensors: list[Tensor]) -> bool:
        """Whether `tensors` are sums over rows by their ids, which a script may have given alike on all ranks."""
        return all(one is None or (one.is_sum and one.of.is_fetched) for one in map(self.marks.mixtures.get, tensors))

    def _mark_made(self, name: str, out: Any, given: list[Tensor]) -> None:
        """Note what the engine has made with stand-ins: values of all ranks, rows of this rank, or fetched rows."""
        found = [one for one in _tensors_in(out) if type(one) is Tensor]
        if name not in _LOOKS_UP and any(getattr(one, "reduces", False) for one in given):
            for one in found:
                self.follower.mark_plain(one)
            return
        with self._around():
            self.follower.recognise(found)
        for one in found:
            if one.dim() and self.marks.rows_of(one) is None:
                self.marks.mark(one, Rows(0, RowSet.fetched(one.size(0))))

    def _without_counts(self, out: Any) -> Any:
        if isinstance(out, OwnCount):
            self.comm.caches.of(OwnCounts).sizes.add(out.own)
            return own_number(out.own)
        if isinstance(out, tuple) and any(isinstance(one, OwnCount) for one in out):
            return OwnShape(self._without_counts(one) for one in out)
        return out

    def _warn(self, refused: RefusedError, of: str = "") -> None:
        if of not in self._warned:
            self._warned.add(of)
            if self.comm.rank == 0 and self.comm.size > 1:
                warnings.warn(f"{refused}. What is computed of it from here on is not followed", stacklevel=5)


def _tensors_in(*values: Any) -> list[Tensor]:
    return [leaf for leaf in torch_private.tree_leaves(values) if isinstance(leaf, Tensor)]


def _plain_operand(leaf: Any) -> Any:
    """The tensor that stands behind a followed one, or behind a mask of the engine's over edges."""
    leaf = plain_of(leaf)
    if isinstance(leaf, Tensor) and type(leaf) not in (Tensor, nn.Parameter):
        with torch_private.DisableTorchFunctionSubclass():
            return leaf.as_subclass(Tensor) if leaf.dtype == torch.bool else leaf
    return leaf
