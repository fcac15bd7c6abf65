"""Following goes on around the model: what is made of what a wrapped model returned, until its loss is differentiated.

In a call that is followed, a wrapped model returns tensors of a class whose operations come here. They run on plain
tensors, and are judged as those within a model are. A rank may look at what it made of its own rows, as scripts do to
print it. So what would be refused in a model is only noted here, and raised when backward comes to it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from shardpass.core.following.functions import ADDS, FollowFunctions
from shardpass.core.following.gradients import follow_function, is_made_of_parameters
from shardpass.core.following.refusals import Mixture
from shardpass.core.following.row_count import OwnCount, leaves_of
from shardpass.core.following.rows import Rows
from shardpass.core.following.user_line import user_line
from shardpass.core.ranks import FollowedTensor, Gives, Ranks, RowSet, plain_of, torch_private
from shardpass.errors import RefusedError

_NOTE = "shardpass"
_RUNS_AS_IT_IS = frozenset("backward __deepcopy__ __repr__ __format__ __reduce_ex__".split())


class FollowedOutput(FollowedTensor):
    """What a wrapped model returned, or what was made of it: another name for the tensor `plain`."""

    @property
    def around(self) -> Around:  # type: ignore[override]
        return self._held()[0]

    @property
    def plain(self) -> Tensor:  # type: ignore[override]
        return self._held()[1]

    def _held(self) -> tuple[Around, Tensor]:
        held: tuple[Around, Tensor] | None = vars(self).get("held")
        with torch_private.DisableTorchFunctionSubclass():
            if held is None or (self.requires_grad and not held[1].requires_grad):
                held = self.held = _held_after_function(self, held)
        return held

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = leaves_of((args, [*(kwargs or {}).values()]))
        around = next(leaf.around for leaf in leaves if isinstance(leaf, FollowedOutput))
        return around.run(func, args, kwargs or {})


def _held_after_function(out: FollowedOutput, held: tuple[Around, Tensor] | None) -> tuple[Around, Tensor]:
    """What `out` holds, which a `torch.autograd.Function` has returned: made in its forward, or given to it."""
    plain = out.as_subclass(Tensor)
    before = [] if out.grad_fn is None else [_notes(node) for node, _ in out.grad_fn.next_functions if node is not None]
    given = [notes[_NOTE] for notes in before if _NOTE in notes]
    if held is None:
        held = next((one for one in given if one[1].data_ptr() == plain.data_ptr()), None)
    around, like = held or (given[0][0], None)
    around.note_function(out, plain, like)
    return around, plain


class Around:
    """Follows what is made of the results of one call.

    Args:
        functions: followed the call.
        comm: the ranks.
    """

    def __init__(self, functions: FollowFunctions, comm: Ranks) -> None:
        self.comm, self.functions = comm, functions
        self.follower, self.marks = functions.follower, functions.follower.marks
        self.follower.all_agree = bool  # a script may let one rank alone do something
        self._has_warned = False

    def followed(self, value: Any, like: Any = None) -> Any:
        """`value` with tensors that are followed in the place of its tensors.

        Args:
            like: tensors of which those of `value` are other names.
        """
        for leaf, known in zip(leaves_of(value), leaves_of(like)) if like is not None else ():
            if isinstance(leaf, Tensor) and isinstance(known, Tensor):
                self.follower.mark_alike(leaf, known)
        return torch_private.tree_map(self._named, value)

    def returned(self, value: Any, gives: Gives) -> Any:
        """See `ResultWatch.returned`."""
        if gives == "number":
            return value
        if gives == "whole":
            self.follower.mark_whole(value)
        elif gives == "rows":
            with self._around():
                self.follower.recognise(value)
        else:
            for one in _tensors_in(value):
                self.follower.mark_plain(one)
        return self.followed(value)

    def check_given(self, value: Any, is_sum: bool) -> None:
        """See `ResultWatch.check_given`."""
        given = torch_private.tree_map(plain_of, value)
        if not is_sum:
            self.marks.check_result(given)
        for one in _tensors_in(given) if is_sum else ():
            if not self.follower.is_sum(one) and (one in self.marks.whole or is_made_of_parameters(one)):
                self.follower.refuse_alike(one)

    def _named(self, leaf: Any) -> Any:
        if type(leaf) is not Tensor:
            return leaf
        with torch_private.DisableTorchFunctionSubclass():
            named: FollowedOutput = leaf.as_subclass(FollowedOutput)
            named.held = self, leaf
            if named.grad_fn is not None:
                _notes(named.grad_fn)[_NOTE] = named.held
                named.grad_fn.register_prehook(_plain_gradients)  # of a Function that has kept what it was given
        return named

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
        name = getattr(func, "__name__", "")
        if name == "__get__" and getattr(func.__self__, "__name__", "") == "grad_fn":
            with torch_private.DisableTorchFunctionSubclass():
                return func(*args)  # what a Function has returned has another one than the tensor that it stands for
        args, kwargs = torch_private.tree_map(plain_of, (args, kwargs))
        if name in _RUNS_AS_IT_IS or func is torch.autograd.grad:
            return func(*args, **kwargs)
        refused, sums = None, self._sums_in(args, kwargs) if name in ADDS else None
        is_of_engine = any(type(one) not in (Tensor, nn.Parameter) for one in _tensors_in(args, kwargs))
        try:
            if is_of_engine:  # what it has made, such as the numbers of nodes, knows what it does with rows
                self.marks.check_result((args, kwargs))
            with nullcontext() if is_of_engine else self._block():
                out = func(*args, **kwargs)
            if is_of_engine:
                self._mark_fetched(out)
        except RefusedError as error:
            if (name.endswith("_") and not name.startswith("__")) or name in ("__setitem__", "set_"):
                raise  # it may have been carried out
            refused = error.with_traceback(None)
            out = func(*args, **kwargs)
        found = _tensors_in(out)
        if refused is not None:
            for one in found:
                self.marks.mixtures.add(one, Mixture(name, user_line(), self._set_of(args), told=refused))
            if not found:
                self._warn(name, refused)
        for one in found:
            if sums is not None and (mixture := self.marks.mixtures.get(one)) is not None:
                self.marks.mixtures.add(one, replace(mixture, is_sum=True))  # what is added has no part in gradients
            self._guard(one)
        return self.followed(self._without_counts(out))

    @contextmanager
    def _around(self) -> Iterator[None]:
        marks = self.marks
        before, marks.is_around = marks.is_around, self.comm.forward is None
        try:
            yield
        finally:
            marks.is_around = before

    @contextmanager
    def _block(self) -> Iterator[None]:
        try:
            with self._around(), self.functions.block():
                yield
        finally:
            self.marks.refusals.clear()  # which are noted on what was made

    def _guard(self, out: Tensor) -> None:
        """Let backward raise if it comes to what was made of several rows and is no sum over them."""
        mixture = self.marks.mixtures.get(out)
        if mixture is None or mixture.is_sum or not out.requires_grad:
            return

        def refuse(_: Tensor) -> None:
            raise mixture.refusal()

        out.register_hook(refuse)

    def _sums_in(self, args: Any, kwargs: Any) -> list[Mixture] | None:
        """The sums over own rows among arguments; `None` if there are none, or single rows or other mixtures beside."""
        tensors = _tensors_in(args, kwargs)
        found = [mixture for one in tensors if (mixture := self.marks.mixtures.get(one)) is not None]
        alone = all(self.marks.rows_of(one) is None for one in tensors) and all(mixture.is_sum for mixture in found)
        return found if found and alone else None

    def _mark_fetched(self, out: Any) -> None:
        self.follower.recognise(out)
        for one in _tensors_in(out):
            if one.dim() and type(one) is Tensor and self.marks.rows_of(one) is None:
                self.marks.mark(one, Rows(0, RowSet.fetched(one.size(0))))

    def _set_of(self, args: Any) -> RowSet:
        return next(iter([*self.marks.sets_in(args), *self.marks.known]), RowSet.fetched(0))

    def _without_counts(self, out: Any) -> Any:
        if isinstance(out, OwnCount):
            self.marks.note_count(out.own)
            return out.own
        if isinstance(out, tuple) and any(isinstance(one, OwnCount) for one in out):
            return torch.Size([self._without_counts(one) for one in out])
        return out

    def _warn(self, name: str, refused: RefusedError) -> None:
        if not self._has_warned:
            self._has_warned = True
            if self.comm.rank == 0:
                warnings.warn(f"{refused}. What is computed of it from here on is not followed", stacklevel=4)


def _tensors_in(*values: Any) -> list[Tensor]:
    return [leaf for leaf in torch_private.tree_leaves(values) if isinstance(leaf, Tensor)]


def _notes(node: Any) -> dict[str, Any]:
    return node.metadata  # type: ignore[no-any-return]


def _plain_gradients(gradients: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(map(plain_of, gradients))
