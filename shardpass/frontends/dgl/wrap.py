"""`wrap`: make an unmodified DGL model run on a sharded graph."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from types import FunctionType
from typing import Any

from dgl import DGLError, DGLGraph
from torch import nn

from shardpass.connection import this_process
from shardpass.core.following import FollowRows
from shardpass.core.graphs import ShardedGraph
from shardpass.core.memory import Checkpoint, check_choice
from shardpass.core.ranks import Ranks, decorrelate, is_wrapped, refuse_shared_model, torch_private
from shardpass.core.training import GradientSums, replace_batch_norms, sync_parameters
from shardpass.core.wrapping import (
    EmptyRows,
    FollowedCalls,
    OutermostCall,
    make_outermost,
    ordinary_graph,
    refuse_as_built,
    runs_as_it_is,
    shared_copy,
)
from shardpass.frontends.dgl.closed import refused
from shardpass.frontends.dgl.convert import graph as to_dgl
from shardpass.frontends.dgl.graph import ShardedDGLGraph
from shardpass.frontends.dgl.layers import adapt
from shardpass.frontends.dgl.refusals import refuse_unsupported


def wrap(model: nn.Module, comm: Ranks | None = None, check: bool = True, checkpoint: Checkpoint = None) -> nn.Module:
    """`model`, ready to be called with a sharded graph where its DGLGraph went. Changed in place. Collective.

    The graph may be what `shardpass.load` returns or what `shardpass.dgl.graph` made of it. Parameters and buffers are
    broadcast from rank 0. Norms and readouts take in the nodes of all ranks, and layers that cannot be exact are
    refused by name. Parameter names and ``state_dict`` keys stay.

    Args:
        model: any DGL model; every rank must pass the same one.
        comm: the ranks that share the graph. `None` is this process alone.
        check: in the first calls and some later ones, follow the rows of nodes and edges through the operations of the
            model, and refuse the first one that puts rows together (see `shardpass.core.following`).
        checkpoint: ``"activations"`` computes norms, activations, dropout and sums between layers that pass messages
            again in backward rather than keeping them. This takes less memory and some more passes over node rows, and
            gives the same bits. It sends nothing, so ranks may differ. `None` keeps everything.

    Raises:
        RefusedError: the model holds a layer that cannot be exact on a sharded graph; it is wrapped for other ranks;
            ranks that are threads pass one model object.
        ValueError: ranks passed different models (on every rank); `checkpoint` is neither None nor ``"activations"``.
    """
    comm = this_process() if comm is None else comm
    check_choice(checkpoint)
    if is_wrapped(model, comm):
        return model
    refuse_shared_model(model, comm)
    refuse_as_built(model, lambda module: module is model)  # layers within it run as they are
    refuse_unsupported(model)
    model = replace_batch_norms(model, comm)
    adapt(model)
    sync_parameters(model, comm)
    decorrelate(comm)
    outermost = partial(_Method, graphs=_Graphs())
    make_outermost(model, comm, check, checkpoint, outermost, _is_known, _own_methods, _own_methods)
    return model


def exact(model: nn.Module, comm: Ranks, check: bool = True) -> nn.Module:
    """A wrapped copy of `model` with the same parameters, for the whole graph while `model` is trained on batches.

    Collective; so is every call. The copy is in evaluation mode and always uses the present parameters and buffers of
    `model`. BatchNorm statistics that batches left on the ranks are averaged before a call. A model that takes one
    block per layer is called with a list of the graph.

    Args:
        model: an ordinary DGL model, not wrapped; its parameters become those of rank 0.
        comm, check: as in `wrap`.

    Raises:
        RefusedError: as in `wrap`, or the model is wrapped.
    """
    return shared_copy(model, comm, partial(wrap, comm=comm, check=check), _own_methods)


def _own_methods(model: nn.Module) -> list[str]:
    """The public methods of the user's class besides ``forward``. They may be called with a graph as well."""
    kinds = [kind for kind in type(model).__mro__ if not kind.__module__.startswith(("torch.", "dgl.", "shardpass."))]
    names = {name: None for kind in kinds for name, value in vars(kind).items() if isinstance(value, FunctionType)}
    return [name for name in names if not name.startswith("_") and not hasattr(nn.Module, name)]


def _is_known(module: nn.Module) -> bool:
    """Whether a module is one of DGL, all of which are exact."""
    return type(module).__module__.startswith(("dgl.nn.", "shardpass.frontends.dgl."))


class _Graphs:
    """What stands for the latest graphs that a model was called with."""

    def __init__(self) -> None:
        self._known: list[tuple[ShardedGraph, ShardedDGLGraph]] = []

    def of(self, value: Any) -> Any:
        """`value`; if it is a graph of the engine, what stands for it. Collective the first time."""
        if not isinstance(value, ShardedGraph):
            return value
        for known, made in self._known:
            if known is value:
                return made
        made = to_dgl(value)
        self._known = [*self._known[-3:], (value, made)]
        return made  # fields that forward leaves on it are there in the next call, as on a DGLGraph

    def __deepcopy__(self, memo: dict[int, Any]) -> _Graphs:
        return _Graphs()  # they belong to the other model


class _Method(OutermostCall):
    """An outermost method, which turns graphs of the engine into DGL's."""

    def __init__(
        self, model: nn.Module, comm: Ranks, followed: FollowedCalls, checkpoint: Checkpoint, sums: GradientSums,
        method: str, is_part: bool = False, *, graphs: _Graphs,
    ) -> None:  # fmt: skip
        super().__init__(model, comm, followed, checkpoint, sums, method)
        self.is_part = is_part
        self._is_of_parts = False
        self._graphs = graphs

    def is_known(self, module: nn.Module) -> bool:
        return super().is_known(module) or _is_known(module)

    def called(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_part and (runs_as_it_is() or self.comm.forward is not None):
            return self.alone(self.plain, args, kwargs)
        args, kwargs = torch_private.tree_map(self._graphs.of, (args, kwargs))
        is_own = self.is_part or self.method != "forward"
        if is_own and self.comm.forward is not None:  # the model calls it itself
            return self.plain(*args, **kwargs)
        given = [*torch_private.tree_leaves((args, kwargs)), *self._held()]
        given = [value for value in given if isinstance(value, DGLGraph)]
        if is_own and not any(isinstance(graph, ShardedDGLGraph) for graph in given):
            return self.alone(self.plain, args, kwargs)
        if not all(isinstance(graph, ShardedDGLGraph) for graph in given):
            raise ordinary_graph(f"{type(self.model).__name__} is called with an ordinary DGLGraph or holds one")
        self._is_of_parts = any(graph.core is None for graph in given)
        self.gives_own_rows = not self._is_of_parts
        return self.run(self._computed, (given, args, kwargs), {})

    def _held(self) -> list[Any]:
        """What the model holds that is a graph, as in ``self.g``; those of the engine become DGL's. Collective."""
        found = []
        for module in self.model.modules():
            for name, value in vars(module).items():
                if isinstance(value, (ShardedGraph, DGLGraph)):
                    vars(module)[name] = self._graphs.of(value)
                    found.append(vars(module)[name])
        return found

    def _follower(self) -> FollowRows | None:
        return None if self._is_of_parts else super()._follower()  # rows of a block stand for others

    def _computed(self, graphs: list[ShardedDGLGraph], args: Any, kwargs: Any) -> Any:
        with EmptyRows() if any(graph.lacks_rows for graph in graphs) else nullcontext():
            try:
                return self.written(self.plain)(*args, **kwargs)
            except DGLError as error:
                if "/src/" not in str(error):  # not from DGL's compiled library, so that it says what is wrong
                    raise
                raise refused(
                    "a function of DGL that reads source nodes or the structure",
                    "use update_all or apply_edges, sample with shardpass.dgl.DataLoader, and do what needs the "
                    "structure of the graph before partitioning",
                    error,
                ) from error
