"""What a wrapped model does around its own code whenever it is called from outside."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from shardpass.core.following import (
    Around,
    FollowFunctions,
    FollowRows,
    first_refusal,
    follow_scripts,
    followed_hooks,
    known_modules,
    state_beside_rows,
    user_line,
)
from shardpass.core.graphs import (
    LoadedGraphs,
    NodeIds,
    refuse_original_order,
    refuse_two_numberings,
)
from shardpass.core.memory import Checkpoint, recomputed_activations
from shardpass.core.ranks import (
    FollowedTensor,
    OnRanks,
    Ranks,
    ResultWatch,
    chained,
    has_raw_parameter,
    is_out_of_memory,
    memory_error,
    ordinary_tensors,
    ordinary_views,
    plain_of,
    torch_private,
)
from shardpass.core.training import GradientSums, refuse_inside_ddp, refuse_sharded, refuse_unlike
from shardpass.core.wrapping.compiling import not_compilable, run_compiled, with_edges
from shardpass.core.wrapping.empty_rows import EmptyRows
from shardpass.core.wrapping.explain import explained
from shardpass.core.wrapping.followed_calls import FollowedCalls
from shardpass.core.wrapping.held_rows import followed_for_hooks
from shardpass.core.wrapping.parts import runs_as_it_is
from shardpass.core.wrapping.refusals import refuse_other_ranks, refuse_script
from shardpass.errors import RefusedError, ShardpassError

_MISTAKES = (TypeError, AttributeError, NameError, KeyError, ImportError, OSError)
"""Errors that no number of rows mends."""


def _refuse_without_rows(error: Exception, follower: FollowRows) -> None:
    """Raise what explains `error` if code of the user's fails on a rank that has no rows of some set."""
    lacking = next((rows for rows in follower.marks.known if rows.count == 0), None)
    is_mistake = isinstance(error, (ShardpassError, *_MISTAKES)) or is_out_of_memory(error)
    line = user_line(error)
    if lacking is not None and not is_mistake and line.number:
        raise RefusedError(
            f"{line}: {type(error).__name__}: {error}. This rank has no {lacking.name}, and code that runs on rows may "
            f"fail without any. If the other ranks do not fail there, partition into fewer parts"
        ) from error


class OutermostCall:
    """A method of a wrapped model as its user calls it. A frontend derives from it.

    Args:
        model: the wrapped model.
        comm: the ranks.
        followed: shared by all methods of the model.
        checkpoint: whether activations are computed again in backward.
        sums: sums gradients of the model, of which `model` may be a part.
        method: its name.
    """

    def __init__(
        self, model: nn.Module, comm: Ranks, followed: FollowedCalls, checkpoint: Checkpoint, sums: GradientSums,
        method: str = "forward",
    ) -> None:  # fmt: skip
        self.model, self.comm, self.followed, self.checkpoint = model, comm, followed, checkpoint
        self.sums, self.method = sums, method
        self._around: tuple[ResultWatch, Any] | None = None
        self._taken: list[FollowedTensor] = []
        self._was_told = False
        self.buffers = frozenset(name for name, _ in model.named_buffers())  # and not those that forward makes, of rows

    compiler: torch_private.Compiler = None
    """What compiles the code of the model in this call; see `torch_private.SET_COMPILER`."""

    before: Callable[[], None] | None = None
    """Is called before the method, unless the model calls it itself. Collective."""

    gives_own_rows = True
    """Whether results hold rows as those of other calls do, and not those of a sampled block."""

    @torch_private.not_compiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        before, self.compiler = self.compiler, torch_private.SET_COMPILER(None)
        try:
            args, kwargs = with_edges((args, kwargs)) if callable(self.compiler) else (args, kwargs)
            return self.called(*args, **kwargs)
        finally:
            torch_private.SET_COMPILER(self.compiler)
            self.compiler = before

    def called(self, *args: Any, **kwargs: Any) -> Any:
        """What a call of the method gives. A frontend defines it."""
        raise NotImplementedError

    @property
    def plain(self) -> MethodType:
        """The method as the class of the model has it."""
        return MethodType(getattr(type(self.model), self.method), self.model)

    def run(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What ``function(*args, **kwargs)`` returns, run as one forward pass, of ordinary tensors. Collective.

        Raises:
            RefusedError: the model puts rows of nodes or edges together outside of message passing; or it is called
                within a transform of ``torch.func``.
            RuntimeError, IndexError: torch's own, and where an argument explains it, its name.
        """
        self.refuse_transforms()
        self._check_followed(args, kwargs)
        args, kwargs = torch_private.tree_map(plain_of, (args, kwargs))
        if not torch.is_inference_mode_enabled():
            return self._run(function, args, kwargs)
        with ordinary_tensors():
            for buffers in map(torch_private.buffers_of, self.model.modules()):
                buffers.update(ordinary_views(buffers))  # of a model that was made in inference mode
            return self._run(function, *ordinary_views((args, kwargs)))

    def _run(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self.comm.forward is None:
            refuse_other_ranks((args, kwargs), self.comm)
            if torch.is_grad_enabled():
                refuse_inside_ddp(self.comm)
            if self.comm.size > 1:
                refuse_sharded(self.model, (args, kwargs), self.sums.local)
            self.comm.run_at_once()
            if self.before is not None:
                self.before()
            refuse_unlike(self.model, self.comm, self.buffers, at_once=not torch.is_grad_enabled())
        recomputes = self.checkpoint is not None and self.model.training
        graphs = self.comm.caches.of(LoadedGraphs).graphs
        lacks_rows = any(rows.count == 0 for graph in graphs for rows in graph.row_sets())
        try:
            with (
                recomputed_activations(self.comm, (args, kwargs), recomputes),
                EmptyRows() if lacks_rows else nullcontext(),
            ):
                return self._as_followed(chained(self.comm, self._summed, function, args, kwargs))
        except (RuntimeError, IndexError) as error:
            why = None
            if type(error) in (RuntimeError, IndexError) and self.comm.forward is None:  # of torch, not of ours
                why = explained(error, self.model, self.plain, args, kwargs)
            if why is None:
                raise
            raise type(error)(why) from error

    @staticmethod
    def refuse_transforms() -> None:
        """Refuse to be traced, or called within a transform of ``torch.func``, before anything is sent."""
        if torch.jit.is_tracing():
            refuse_script()
        if (transform := torch_private.running_transform()) is not None:
            raise RefusedError(
                f"{user_line()}: a wrapped model is called within a functional transform ({transform}), but rows that "
                f"travel between ranks go through torch.autograd in reverse mode only. Use loss.backward() or "
                f"torch.autograd.grad, with create_graph=True for derivatives of derivatives, and call one model after "
                f"the other in place of vmap"
            )

    def alone(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What ``function(*args, **kwargs)`` returns, which is given no graph. Collective in backward, if with tensors.

        It may be a decoder that is given the rows which another call has returned.
        """
        is_given_rows = any(isinstance(leaf, Tensor) for leaf in torch_private.tree_leaves((args, kwargs)))
        if self.comm.forward is not None or not (is_given_rows or self.method == "forward") or runs_as_it_is():
            return function(*args, **kwargs)
        self._check_followed(args, kwargs)
        args, kwargs = torch_private.tree_map(plain_of, (args, kwargs))
        return self._as_followed(chained(self.comm, self._within, function, args, kwargs))

    def _check_followed(self, args: Any, kwargs: Any) -> None:
        taken = [one for one in torch_private.tree_leaves((args, kwargs)) if isinstance(one, FollowedTensor)]
        for one in taken:
            one.around.check_given(one)
        self._taken = taken

    def _as_followed(self, out: Any) -> Any:
        """What a chain returns, in a form that is followed if the function in it has left that to this one."""
        found, self._around = self._around, None
        return out if found is None else found[0].followed(out, found[1])

    def _within(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if torch.is_grad_enabled():  # or else one rank may run it alone
            refuse_sharded(self.model)
            refuse_unlike(self.model, self.comm, self.buffers, at_once=False)
        return self._summed(function, args, kwargs)

    def _summed(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with self.sums.within(self.model):
            return self._followed(function, args, kwargs)

    def _followed(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        forward = self.comm.forward
        if forward is None or forward.rows is not None:
            return function(*args, **kwargs)
        self.followed.held.make_plain()
        if (follower := self._follower()) is None:
            return self._unfollowed(lambda: function(*args, **kwargs))
        leaves = torch_private.tree_leaves((args, kwargs))
        follower.marks.known += {ids.row_set for ids in leaves if isinstance(ids, NodeIds)}  # labels go with them
        forward.rows, forward.reads_edges = follower, False
        follow_scripts(self.model)  # of a copy, too
        try:
            with (
                torch_private.uncompiled(),
                follower,
                FollowFunctions(follower) as functions,
                follower.module(self.is_known(self.model)),
                known_modules(self.model, self.is_known, follower),
                followed_hooks(self.model, follower, functions.block),
                followed_for_hooks(self.model, around := Around(functions, self.comm), self.comm.size > 1),
            ):
                with follower.paused():
                    self._check_arguments(follower, args, kwargs)
                out = function(*args, **kwargs)
                for leaf in torch_private.tree_leaves(out):
                    functions.note_function(leaf)
            follower.marks.check_refusals()
        except RefusedError as error:  # a library may read numbers of rows to explain why memory ran out
            lack = memory_error(error)
            told = first_refusal(error) if lack is None else lack
            if told is error:
                raise
            raise told from None
        except Exception as error:
            follower.marks.check_refusals()  # TorchScript raises an error of its own, without a word of ours
            _refuse_without_rows(error, follower)
            raise
        finally:
            forward.rows = None
            follower.marks.end_forward()
            self.followed.reads_edges = forward.reads_edges or bool(self.followed.reads_edges)
        follower.marks.check_left_behind(out, self.model)
        self._warn_of_hooks()
        if self.comm.size > 1:  # one rank has all rows
            self._around = around, out
            self.followed.note_results(self.model, self.method, around, out)
        return out

    def written(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """`run`, which the model's user or a library wrote, compiled if this call is. See [Note: what is compiled]."""

        forward = self.comm.forward
        if (
            not callable(self.compiler)
            or self.is_layer(self.model)
            or (forward is not None and forward.rows is not None)
        ):
            return run

        def compiled(*args: Any, **kwargs: Any) -> Any:
            reads_edges = forward is not None and forward.reads_edges
            if (why := not_compilable((args, kwargs), reads_edges, self.checkpoint is not None)) is None:
                return run_compiled(self.compiler, self.model, self.is_layer, run, args, kwargs)
            if not self._was_told and self.comm.rank == 0:
                warnings.warn(
                    f"torch.compile leaves {type(self.model).__name__}.{self.method} as it is: {why}", stacklevel=2
                )
            self._was_told = True
            return run(*args, **kwargs)

        return compiled

    def _unfollowed(self, run: Callable[[], Any]) -> Any:
        self._taken.clear()  # which would keep their graphs of autograd alive
        forward = self.comm.forward
        if self.followed.is_on and forward is not None:
            forward.is_left_out = self.followed.follow_all
            forward.reads_edges = self.followed.reads_edges is not False
        if not self.gives_own_rows:
            return run()
        out, around = self.followed.unfollowed(self.model, self.method, run)
        self._around = None if around is None else (around, out)
        return out

    def _warn_of_hooks(self) -> None:
        if self.method == "forward" and self.comm.rank == 0 and any(torch_private.backward_hooks(self.model)):
            warnings.warn(
                "a hook of gradients on the wrapped model itself is not followed, and sees only the rows of this rank. "
                "Register it on a module within the model",
                stacklevel=3,
            )

    def _check_arguments(self, follower: FollowRows, args: Any, kwargs: Any) -> None:
        """Tell `follower` what is known of the arguments, and what the model keeps. Refuse what cannot be exact."""
        while self._taken:
            one = self._taken.pop()
            one.around.tell(follower.marks, one.plain)
        leaves = torch_private.tree_leaves((args, kwargs))
        if self.comm.size > 1 and any(isinstance(leaf, Tensor) and has_raw_parameter(leaf) for leaf in leaves):
            raise state_beside_rows(user_line(), self.method)
        follower.marks.recognise((args, kwargs), is_given=True)
        follower.marks.check_arguments(args, kwargs)
        follower.marks.recognise([vars(module) for module in self.model.modules()], is_given=True)
        if not self.followed.knows_order:
            loaded = [*self.comm.caches.of(LoadedGraphs).graphs]
            refuse_original_order((args, kwargs), loaded)
            refuse_two_numberings((args, kwargs), loaded)
            self.followed.knows_order = True

    def is_known(self, module: nn.Module) -> bool:
        """Whether `module` is known to be exact; a frontend adds the layers of its library."""
        return isinstance(module, OnRanks)

    def is_layer(self, module: nn.Module) -> bool:
        """Whether `module` may exchange rows; a frontend adds the layers that users wrote."""
        return self.is_known(module)

    def _follower(self) -> FollowRows | None:
        return self.followed.next(self.model, self.comm, self.method)

    def __deepcopy__(self, memo: dict[int, Any]) -> OutermostCall:
        self._taken.clear()
        copied = memo[id(self)] = type(self).__new__(type(self))
        vars(copied).update(copy.deepcopy(vars(self), memo))
        return copied


class RowwisePart(OutermostCall):
    """A method of a module in a wrapped model that may be called by itself, on rows that the model returned.

    Args:
        knows: whether a module is known to be exact.
    """

    def __init__(
        self, model: nn.Module, comm: Ranks, followed: FollowedCalls, checkpoint: Checkpoint, sums: GradientSums,
        method: str = "forward", *, knows: Callable[[nn.Module], bool],
    ) -> None:  # fmt: skip
        super().__init__(model, comm, followed, checkpoint, sums, method)
        self.adapted: Any = vars(model).get(method)  # which the frontend may have put there
        self._knows = knows

    def is_known(self, module: nn.Module) -> bool:
        return self._knows(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.alone(self.adapted or self.plain, args, kwargs)


def replaced_forward(module: nn.Module) -> Any:
    """What a user or a frontend has put in the place of the `forward` of `module`; `None` if nothing."""
    own = vars(module).get("forward")
    return getattr(own, "adapted", own)
