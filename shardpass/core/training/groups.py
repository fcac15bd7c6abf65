"""Ranks that share a graph beside those that share gradients of several graphs, each in a group of its own.

[Note: groups of ranks]
In a mesh of data x graph, the ranks along ``graph`` share a graph, and those along ``data`` train one model, each with
another graph. Backward of a wrapped model sums gradients along ``graph`` in front of the parameters, so what averages
along ``data`` finds whole sums: hooks of DistributedDataParallel and of ``fully_shard``, or a script. It is right that
way since every rank along ``graph`` has the same sums then.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shardpass.core.ranks import Ranks, is_local, torch_private
from shardpass.errors import RefusedError

_ONE_PIECE = (
    "wrap the model first, and then shard it in one piece, as in fully_shard(model, mesh=mesh['data']), and none of "
    "its modules; for a method besides forward, call register_fsdp_forward_method(model, name)"
)


def refuse_ddp(around: DistributedDataParallel, where: str, comm: Ranks) -> None:
    """Raise if DistributedDataParallel averages over ranks of `comm`. See [Note: groups of ranks].

    Args:
        around: what averages.
        where: what is within it, for the error.

    Raises:
        RefusedError: its process group has other ranks of `comm`, or these are no processes of ``torch.distributed``.
    """
    if comm.size == 1:
        return
    others = [process for rank, process in enumerate(comm.processes) if rank != comm.rank]
    if others and {*dist.get_process_group_ranks(around.process_group)}.isdisjoint(others):
        return
    raise RefusedError(
        f"DistributedDataParallel around {where} is refused: it averages gradients over ranks that share a graph, "
        f"whose gradients are parts of one sum. Remove it: backward of a wrapped model sums them. For groups of ranks, "
        f"each with a graph of its own, give it ranks that share none: DistributedDataParallel(model, "
        f"process_group=mesh['data'].get_group()), where comm is connect(mesh['graph'])"
    )


def refuse_inside_ddp(comm: Ranks) -> None:
    """Refuse to run inside the forward of DistributedDataParallel, unless it is of other ranks than `comm`."""
    around = torch_private.ddp_around()
    if around is not None:
        refuse_ddp(around, "the wrapped model", comm)


def is_fully_sharded(module: nn.Module) -> bool:
    """Whether ``fully_shard`` was applied to it: it is an ``FSDPModule``, which takes seconds to import."""
    return hasattr(type(module), "set_requires_gradient_sync")


def is_sharded(tensor: Any) -> bool:
    """Whether it is a ``DTensor``, of which this process has a part; that takes seconds to import, too."""
    return hasattr(type(tensor), "full_tensor")


def refuse_parts(model: nn.Module, call: str, instead: str) -> None:
    """Raise if `model` has a parameter of which this process has a part.

    Args:
        call: what was called, for the error.
        instead: what to do.

    Raises:
        RefusedError: naming the first such parameter.
    """
    for name, parameter in model.named_parameters():
        if is_sharded(parameter):
            raise RefusedError(f"{call}: parameter {name!r} is sharded over processes (a DTensor): {instead}")


def refuse_sharded(model: nn.Module, args: Any = (), local: Collection[str] = ()) -> None:
    """Raise unless all of each parameter is here and what ``fully_shard`` does in backward comes after the sums.

    Args:
        args: of the call that begins.
        local: the names of the parameters that were rows owned by ranks when the model was wrapped.

    Raises:
        RefusedError: it does not.
    """
    refuse_parts(model, type(model).__name__, _ONE_PIECE)
    for name, module in model.named_modules():
        if not is_fully_sharded(module):
            continue
        if module is not model:
            raise RefusedError(f"fully_shard was applied to module {name!r} within a wrapped model: {_ONE_PIECE}")
        lost = [name for name, parameter in module.named_parameters() if name in local and not is_local(parameter)]
        if lost:
            raise RefusedError(
                f"fully_shard has sharded {lost[0]!r}, rows that ranks own already: leave them out by "
                f"fully_shard(model, mesh=mesh['data'], ignored_params={{model.get_parameter({lost[0]!r})}}), and "
                f"average their gradient yourself where the groups have the same graph"
            )
        leaves = torch_private.tree_leaves(args)
        if torch.is_grad_enabled() and any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves):
            raise RefusedError(
                "an argument of a model that fully_shard has sharded requires a gradient: its parameters are freed as "
                "soon as backward has found that, before their own gradients are summed. Give it as "
                "a parameter of the model, or use DistributedDataParallel(model, process_group=...)"
            )
