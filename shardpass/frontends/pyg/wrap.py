"""`wrap`: make an unmodified PyG model run on a sharded graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.utils._pytree import tree_map
from torch_geometric.nn.conv import MessagePassing

from shardpass.backends.communicator import Communicator
from shardpass.core.calls import chained
from shardpass.core.gradients import note_forward, sync_parameters
from shardpass.core.graph import ShardedGraph
from shardpass.core.norm import replace_batch_norms
from shardpass.core.random import decorrelate
from shardpass.errors import RefusedError
from shardpass.frontends.pyg.lazy import LazyEdges, Poison
from shardpass.frontends.pyg.propagate import ShardedMessagePassing
from shardpass.frontends.pyg.refusals import refuse_unsupported


def wrap(model: nn.Module, comm: Communicator, check: bool = True) -> nn.Module:
    """`model`, ready to be called with a `ShardedGraph` where ``edge_index`` went. Changed in place. Collective.

    Parameters and buffers are broadcast from rank 0. Message passing is carried out by the engine, BatchNorm uses the
    statistics of all ranks' nodes, and layers that cannot be exact are refused by name. Parameter names, ``state_dict``
    keys and the class of the model stay; with an ordinary ``edge_index`` it still runs as before, on one rank.

    Args:
        model: any PyG model; every rank must pass the same one.
        comm: the ranks that share the graph.
        check: reserved for the self-check on a small random graph.

    Raises:
        RefusedError: the model holds a layer that cannot be exact on a sharded graph.
        ValueError: ranks passed different models (on every rank).
    """
    if getattr(model, "_shardpass_wrapped", False):
        return model
    if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        raise RefusedError(
            f"{type(model).__name__} averages gradients, but those of a sharded graph must be summed: wrap the "
            f"model inside it, and call sync_gradients(model, comm) after backward"
        )
    for name, parameter in model.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise RefusedError(
                f"parameter {name!r} has no shape yet (a lazy layer, in_channels=-1). Give the number of input "
                f"channels, or run the model once on a few nodes before wrap"
            )
    refuse_unsupported(model)
    model = replace_batch_norms(model, comm)
    for name, module in model.named_modules():
        if isinstance(module, MessagePassing):
            _attach(module, name)
    sync_parameters(model, comm)
    decorrelate(comm)
    model._shardpass_wrapped = True  # type: ignore[assignment]
    model.forward = _Forward(model, comm)  # type: ignore[method-assign]
    return model


def _attach(conv: MessagePassing, name: str) -> None:
    title = f"{type(conv).__name__} ({name})" if name else type(conv).__name__
    engine = ShardedMessagePassing(conv, title)
    conv.propagate = _Method(engine, "propagate")  # type: ignore[method-assign]
    if conv.inspector.implements("edge_update"):
        conv.edge_updater = _Method(engine, "edge_updater")  # type: ignore[method-assign]


class _Method:
    """A bound method that deep copies with its layer (a plain bound method would stay with the old one)."""

    def __init__(self, engine: ShardedMessagePassing, name: str) -> None:
        self.engine, self.name = engine, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.engine, self.name)(*args, **kwargs)


class _Forward:
    """The outermost forward: turns graphs into ``edge_index`` and ties the call into one order of backward."""

    def __init__(self, model: nn.Module, comm: Communicator) -> None:
        self.model, self.comm = model, comm

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model = self.model
        if torch.is_grad_enabled():
            note_forward(model)
        args, kwargs = tree_map(_edge_index_of, (args, kwargs))
        return chained(self.comm, self._run, *args, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        return tree_map(_returned, type(self.model).forward(self.model, *args, **kwargs))


def _returned(value: Any) -> Any:
    """A deferred edge result is computed while the ranks are still in step; a value that is not there is said so."""
    if isinstance(value, Poison):
        raise RefusedError(value.reason)
    return value.materialise() if isinstance(value, LazyEdges) else value


def _edge_index_of(value: Any) -> Any:
    return value.edge_index if isinstance(value, ShardedGraph) else value
