"""Models, modules and calls that both frontends refuse, because their results on a sharded graph would be wrong.

A frontend says what it has found. The words are here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shardpass.core.following import user_line
from shardpass.core.graphs import ShardedEdgeIndex
from shardpass.core.ranks import Ranks, torch_private
from shardpass.core.training import BATCH_NORMS, DistributedBatchNorm, refuse_sharded
from shardpass.errors import RefusedError

_NORMS_OF_OTHER_SHAPES = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


def refuse_as_built(model: nn.Module, is_layer: Callable[[nn.Module], bool]) -> None:
    """Raise if `model` cannot be wrapped as it is built. `is_layer` knows the modules that cannot be compiled before.

    Raises:
        RefusedError: it averages gradients over ranks, or ``fully_shard`` has sharded it; a parameter has no shape
            yet; or what passes messages is compiled.
    """
    if isinstance(model, (DistributedDataParallel, nn.DataParallel)):
        raise RefusedError(
            f"{type(model).__name__} averages gradients, but those of a sharded graph must be summed: wrap the "
            f"model inside it, whose backward sums them; for several groups of ranks, each with a graph, put "
            f"DistributedDataParallel around what is wrapped, with process_group= the ranks that share no graph"
        )
    refuse_sharded(model)
    for name, parameter in model.named_parameters():
        if nn.parameter.is_lazy(parameter):
            raise RefusedError(
                f"parameter {name!r} has no shape yet (a lazy layer, in_channels=-1). Give the number of input "
                f"channels, or run the model once on a few nodes before wrap"
            )
    for name, module in model.named_modules():
        if isinstance(getattr(module, "_orig_mod", None), nn.Module) and any(map(is_layer, module.modules())):
            raise RefusedError(
                f"{name or 'the model'} is compiled and has layers that pass messages, in which ranks communicate: "
                f"wrap the model first, then compile it (its layers run as they are) or its dense parts"
            )


def refuse_script() -> NoReturn:
    """Raise what is told where a wrapped model is scripted or traced."""
    raise RefusedError(
        "a wrapped model cannot be scripted or traced, since ranks communicate in it: save its state_dict and load "
        "that into a model that is not wrapped, or torch.compile its dense parts, as in model.mlp = "
        "torch.compile(model.mlp)"
    )


def ordinary_graph(found: str, place: str = "") -> RefusedError:
    """The error for a graph that is not sharded: who was given it, and the `place` of the right one."""
    return RefusedError(
        f"{user_line()}: {found}, but nodes of a sharded graph are numbered anew on every rank. Pass the graph that "
        f"shardpass.load or shard returned{place}. For an ordinary graph, load the state_dict into a model that is not "
        f"wrapped"
    )


def refuse_modules(model: nn.Module, reason_of: Callable[[nn.Module], str | None]) -> None:
    """Raise if `model` has a module for which `reason_of` gives a reason why it cannot be exact.

    Raises:
        RefusedError: naming the first such module, the reason, and what to do.
    """
    for name, module in model.named_modules():
        reason = reason_of(module)
        if reason:
            where = f" (at {name!r})" if name else ""
            raise RefusedError(f"{type(module).__name__}{where} cannot be exact on a sharded graph: {reason}")


def refuse_other_library(model: nn.Module, prefix: str, library: str, wrap: str) -> None:
    """Raise if `model` has a layer from a module whose name begins with `prefix`: its library has a `wrap` of its own.

    Raises:
        RefusedError: naming the first such layer.
    """
    for name, module in model.named_modules():
        if any(kind.__module__.startswith(prefix) for kind in type(module).__mro__):
            where = f" (at {name!r})" if name else ""
            raise RefusedError(f"{type(module).__name__}{where} is a layer of {library}: wrap the model by {wrap}")


def has_unknown_statistics(module: nn.Module) -> bool:
    """Whether `module` is a norm of torch over all nodes, or derived from one, that is not computed over all ranks."""
    if isinstance(module, _NORMS_OF_OTHER_SHAPES):
        return module.track_running_stats
    known = type(module) in BATCH_NORMS or isinstance(module, DistributedBatchNorm)
    return isinstance(module, torch_private.AnyBatchNorm) and not known


def refuse_other_ranks(arguments: object, comm: Ranks) -> None:
    """Raise if a graph among the arguments of a model is shared by other ranks than those of the model.

    Raises:
        RefusedError: it is.
    """
    for leaf in torch_private.tree_leaves(arguments):
        plan = leaf.plan if isinstance(leaf, ShardedEdgeIndex) else None
        theirs = plan.comm if plan is not None else getattr(leaf, "comm", None) if type(leaf) is not Tensor else None
        if isinstance(theirs, Ranks) and theirs.size != comm.size:
            raise RefusedError(
                f"{user_line()}: the model is wrapped for {_counted(comm.size)}, but the graph is shared by "
                f"{_counted(theirs.size)}: pass one communicator to both, as in shardpass.shard(data, comm) and "
                f"wrap(model, comm)"
            )


def _counted(size: int) -> str:
    return "this process alone" if size == 1 else f"{size} ranks"
