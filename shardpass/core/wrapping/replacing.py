"""What a frontend puts in the place of a model's own code: outermost methods, and copies of functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import CellType, FunctionType
from typing import Any

from torch import nn

from shardpass.core.following import follow_scripts
from shardpass.core.memory import Checkpoint
from shardpass.core.ranks import Ranks
from shardpass.core.training import GradientSums
from shardpass.core.wrapping.followed_calls import FollowedCalls
from shardpass.core.wrapping.outermost import OutermostCall, RowwisePart
from shardpass.core.wrapping.parts import parts_of, rowwise_parts
from shardpass.core.wrapping.refusals import refuse_script

Methods = Callable[[nn.Module], Iterable[str]]


def make_outermost(
    model: nn.Module, comm: Ranks, check: bool, checkpoint: Checkpoint, outermost: Callable[..., OutermostCall],
    is_known: Callable[[nn.Module], bool], methods: Methods, methods_of_part: Methods,
    methods_of_module: Methods = lambda module: (),
) -> None:  # fmt: skip
    """Put what runs in the outermost call in the place of methods of `model` and of its parts.

    Args:
        check, checkpoint: as of ``wrap``.
        outermost: makes it, from the arguments of `OutermostCall` and whether it is of a part (``is_part=``).
        is_known: whether a module is known to be exact.
        methods, methods_of_part: the methods besides ``forward``, of the model and of a part that its user wrote.
        methods_of_module: methods of any module that may be called by themselves on several ranks.
    """
    follow_scripts(model)
    model.__prepare_scriptable__ = refuse_script  # type: ignore[assignment]
    sums = model._shardpass_wrapped = GradientSums(comm, model)  # type: ignore[assignment]
    followed = FollowedCalls(check)
    for name in ("forward", *methods(model)):
        setattr(model, name, outermost(model, comm, followed, checkpoint, sums, name))
    for part in parts_of(model, is_known):
        followed = FollowedCalls(check)
        for name in ("forward", *methods_of_part(part)):
            setattr(part, name, outermost(part, comm, followed, checkpoint, sums, name, is_part=True))
    if comm.size == 1:
        return
    for part in rowwise_parts(model, is_known):
        part.forward = RowwisePart(part, comm, FollowedCalls(check), checkpoint, sums, knows=is_known)
    for module in model.modules():
        for name in methods_of_module(module):
            rowwise = RowwisePart(module, comm, FollowedCalls(check), checkpoint, sums, name, knows=is_known)
            setattr(module, name, rowwise)


def with_names(function: Any, **names: Any) -> Callable[..., Any]:
    """A copy of `function` in which the global `names` mean something else. The module it comes from stays as it is."""
    return copy_of(function, {**function.__globals__, **names}, function.__closure__)


def copy_of(function: Any, names: dict[str, Any], closure: tuple[CellType, ...] | None) -> Callable[..., Any]:
    """A copy of `function` with other global `names` and another `closure`."""
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__, closure)
    copy.__kwdefaults__, copy.__qualname__ = function.__kwdefaults__, function.__qualname__
    copy.__dict__.update(function.__dict__)
    return copy
