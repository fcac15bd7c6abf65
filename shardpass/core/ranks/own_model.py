"""A model for each rank. Ranks that are threads could be given the same one, and would overwrite its values."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from shardpass.core.ranks import torch_private
from shardpass.core.ranks.random import are_threads
from shardpass.core.ranks.ranks import Ranks, require_ranks
from shardpass.errors import RefusedError


def is_wrapped(model: nn.Module, comm: Ranks) -> bool:
    """Whether `model` is wrapped already, for these ranks. Not collective.

    Raises:
        RefusedError: it is wrapped for other ranks: another rank, which is a thread, or an earlier run has wrapped it.
        TypeError: `model` is no model, or `comm` no communicator.
    """
    if not isinstance(model, nn.Module):
        found = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        hint = f"wrap({model.__name__}(...), comm)" if isinstance(model, type) else "wrap(model, comm)"
        raise TypeError(f"wrap: `model` must be a torch.nn.Module, but got {found}: write {hint}")
    require_ranks(comm, "wrap(model, comm)")
    if not getattr(model, "_shardpass_wrapped", False):
        return False
    if getattr(model.forward, "comm", comm) is not comm:
        raise RefusedError(
            f"{type(model).__name__} is wrapped already, with another communicator (by another rank, which is a thread "
            f"of this process, or in an earlier run): build a model on each rank, or wrap copy.deepcopy of one that "
            f"is not wrapped"
        )
    return True


def is_local(parameter: Tensor) -> bool:
    """Whether it is rows of which each rank has its own."""
    return getattr(parameter, "shardpass_local", False)


def is_summed_before(leaf: Any) -> bool:
    """Whether a leaf of autograd is a parameter of a wrapped model, whose gradients are summed before they reach it."""
    return getattr(leaf, "shardpass_summed", False)


def is_parameter(tensor: Tensor) -> bool:
    """Whether `tensor` is a parameter, or what stands for one while a wrapped model runs."""
    function = torch_private.function_of(tensor.grad_fn)
    return isinstance(tensor, nn.Parameter) or getattr(function, "gives_parameters", False)


def autograd_leaves(tensor: Tensor) -> Iterator[Any]:
    """The leaves of autograd that `tensor` is made of; `None` for a call of the engine, behind which nobody looks.

    The gradient of a parameter, which every rank has alike, is made of that parameter.
    """
    edges: list[tuple[Any, int]] = [(tensor.grad_fn, tensor.output_nr)]
    seen = set[Any]()
    if tensor.grad_fn is None:
        yield tensor
    while edges:
        node, place = edges.pop()
        if node is None or (node, place) in seen:
            continue
        seen.add((node, place))
        function = torch_private.function_of(node)
        if getattr(function, "ties_gradients", False):
            before = node.next_functions[1 + place]  # the token is the first
            if before[0] is None:
                yield None  # zeros, where this rank has found nothing
            edges.append(before)
        elif getattr(function, "gives_gradients", False):
            yield node.parameters[place]
        elif function is not None and function.__module__.startswith("shardpass."):
            yield None
        elif hasattr(node, "variable"):
            yield node.variable
        else:
            edges += node.next_functions


def has_raw_parameter(tensor: Tensor) -> bool:
    """Whether a parameter went into `tensor` that every rank has, and whose gradient nobody sums behind it."""
    return tensor.requires_grad and any(map(_is_raw, autograd_leaves(tensor)))


def is_made_of_parameters(tensor: Tensor) -> bool:
    """Whether nothing but such parameters went into `tensor`. Each rank has the whole gradient of it."""
    return tensor.requires_grad and all(map(_is_raw, autograd_leaves(tensor)))


def _is_raw(leaf: Any) -> bool:
    return isinstance(leaf, nn.Parameter) and not is_local(leaf)


@dataclass
class ParameterCopies:
    """What modules hold in the place of parameters while a wrapped model runs: copies that share their memory.

    Attributes:
        places: the dicts of modules, a name in each, and the parameter that it stands for.
        copy_of: the copy of each parameter.
    """

    places: list[tuple[dict[str, Any], str, Tensor]]
    copy_of: dict[Tensor, Tensor]

    @contextmanager
    def held(self, among: Collection[Tensor] | None = None) -> Iterator[None]:
        """A block in which modules hold the copies, or those `among` them, where they hold parameters now."""
        wanted = None if among is None else {id(copy) for copy in among}
        changed = []
        for held, name, parameter in self.places:
            copy = self.copy_of[parameter]
            if (wanted is None or id(copy) in wanted) and _holds(held, name, parameter):
                held[name] = copy
                changed.append((held, name, parameter, copy))
        try:
            yield
        finally:
            for held, name, parameter, copy in changed:
                if _holds(held, name, copy):  # and not what the block has put there
                    held[name] = parameter


def _holds(held: dict[str, Any], name: str, value: Tensor) -> bool:
    return name in held and held[name] is value  # a module that TorchScript has compiled has no dict, with no `get`


class FetchedUnwrapped:
    """Whether rows of sources were read while no wrapped model ran."""

    has_happened = False
    has_warned = False


def warn_of_unwrapped(model: nn.Module, comm: Ranks, stacklevel: int) -> None:
    """Warn once if `model` is not wrapped and rows were fetched outside of wrapped models. Not collective.

    Args:
        model: whose gradients are summed.
        comm: the ranks.
        stacklevel: of the line to name, as `warnings.warn` counts.
    """
    fetched = comm.caches.of(FetchedUnwrapped)
    if not fetched.has_happened or fetched.has_warned or comm.rank > 0:
        return
    if not any(getattr(module, "_shardpass_wrapped", False) for module in model.modules()):
        fetched.has_warned = True
        warnings.warn(
            f"{type(model).__name__} is not wrapped, and has probably run on the graph so: its parameters may differ "
            f"between ranks, its norms see the nodes of one rank, and nothing checks it. Call model = "
            f"shardpass.pyg.wrap(model, comm) before the first forward. If you read rows by edge_index yourself, "
            f"outside of the model, you can ignore this",
            stacklevel=stacklevel + 1,
        )


def refuse_shared_model(model: nn.Module, comm: Ranks, caller: str = "wrap") -> None:
    """Raise if ranks hold the same model, or the same trainable parameters. Collective if ranks are threads.

    Args:
        caller: who asks, for the error of a rank that waits here.

    Raises:
        RefusedError: they do. It is raised on every rank.
    """
    if not are_threads(comm):
        return
    mine = [id(model), *(id(parameter) for parameter in model.parameters() if parameter.requires_grad)]
    held = comm.all_gather_object(mine, f"{caller}: a model for each rank")
    for rank, own in enumerate(held):
        for other in range(rank):
            if set(own) & set(held[other]):
                raise RefusedError(
                    f"ranks {other} and {rank} hold the same model, or parameters of it: they are threads of one "
                    f"process, and gradients would be added up in one place. Build the model in the function that each "
                    f"rank runs, or copy.deepcopy it there"
                )
