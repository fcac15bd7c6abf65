"""`wrap`: make an unmodified PyG model run on a sharded graph."""

from __future__ import annotations

from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import nn
from torch_geometric.nn.conv import MessagePassing

from shardpass.connection import this_process
from shardpass.core.following import is_called_by
from shardpass.core.graphs import GraphArgument, ShardedEdgeIndex, ShardedGraph, ShardedHeteroGraph
from shardpass.core.memory import Checkpoint, check_choice
from shardpass.core.ranks import Ranks, decorrelate, is_wrapped, refuse_shared_model, torch_private
from shardpass.core.training import GradientSums, replace_batch_norms, sync_parameters
from shardpass.core.wrapping import (
    FollowedCalls,
    OutermostCall,
    make_outermost,
    refuse_as_built,
    runs_as_it_is,
    shared_copy,
)
from shardpass.errors import RefusedError
from shardpass.frontends.pyg.adjacency import refuse_sparse
from shardpass.frontends.pyg.attention import distribute_attention
from shardpass.frontends.pyg.derived_edges import find_edges_again
from shardpass.frontends.pyg.functions import explained
from shardpass.frontends.pyg.hetero import adapt_hetero, check_types, has_one_tensor_of_all_types, holds_arguments
from shardpass.frontends.pyg.lazy import Lazy
from shardpass.frontends.pyg.methods import (
    adapt_methods,
    is_replaced,
    methods_replaced,
    methods_to_run,
    methods_written,
    with_written,
)
from shardpass.frontends.pyg.norms import distribute_norms
from shardpass.frontends.pyg.poison import Poison
from shardpass.frontends.pyg.propagate import ShardedMessagePassing
from shardpass.frontends.pyg.refusals import (
    check_arguments_of,
    no_explanations,
    refuse_node_tables,
    refuse_norms_of_some_nodes,
    refuse_unsupported,
    refuse_whole_tensors,
)
from shardpass.frontends.pyg.relations import join_relations


def wrap(model: nn.Module, comm: Ranks | None = None, check: bool = True, checkpoint: Checkpoint = None) -> nn.Module:
    """`model`, ready to be called with a `ShardedGraph` where ``edge_index`` went. Changed in place. Collective.

    Rank 0 broadcasts its parameters and buffers. From then on the engine passes the messages, norms use the statistics
    of all ranks' nodes, and an ordinary ``edge_index`` is refused, because a sharded graph numbers nodes anew. Layers
    that cannot be exact are refused by name. Parameter names, ``state_dict`` keys and the class of the model stay.

    Args:
        model: any PyG model; every rank must pass the same one.
        comm: the ranks that share the graph. `None` is this process alone.
        check: in the first calls and some later ones, follow the rows of nodes and edges through the operations of the
            model, and refuse the first one that puts rows together (see `shardpass.core.following`).
        checkpoint: with ``"activations"``, backward computes norms, activations, dropout and sums between layers that
            pass messages again, and forward does not keep them. This takes less memory and some more passes over node
            rows, and gives the same bits. Nothing is sent for it, so ranks may differ.

    Raises:
        RefusedError: the model has a layer that cannot be exact on a sharded graph; it is wrapped for other ranks; or
            ranks that are threads pass the same model object. A call raises it where the check refuses an operation.
        ValueError: ranks passed different models (on every rank); `checkpoint` is neither `None` nor ``"activations"``.
    """
    comm = this_process() if comm is None else comm
    check_choice(checkpoint)
    if is_wrapped(model, comm):
        return model
    refuse_shared_model(model, comm)
    refuse_as_built(model, lambda module: isinstance(module, MessagePassing))
    refuse_unsupported(model)
    model = replace_batch_norms(model, comm)
    distribute_norms(model, comm)
    distribute_attention(model, comm)
    for name, module in model.named_modules():
        if isinstance(module, MessagePassing):
            _attach(module, name)
            check_arguments_of(module, _title(module, name))
        adapt_methods(module, comm)
        if isinstance(module, MessagePassing):
            find_edges_again(module)
            join_relations(module)
    adapt_hetero(model, comm)
    sync_parameters(model, comm)
    decorrelate(comm)
    _make_outermost(model, comm, check, checkpoint)
    if isinstance(model, torch.fx.GraphModule):  # as to_hetero makes them; their copies lose attributes
        torch_private.on_deepcopy(model, partial(_make_outermost, comm=comm, check=check, checkpoint=checkpoint))
    return model


def exact(model: nn.Module, comm: Ranks, check: bool = True) -> nn.Module:
    """A wrapped copy of `model` with the same parameters, for the whole graph while `model` is trained on batches.

    Collective, as every call of the copy is. The copy is in evaluation mode and always uses the present parameters and
    buffers of `model`. Before each call, the BatchNorm statistics that batches left on the ranks are averaged.

    Args:
        model: an ordinary PyG model, not wrapped; its parameters become those of rank 0.
        comm, check: as in `wrap`.

    Raises:
        RefusedError: as in `wrap`, or the model is wrapped.
    """
    return shared_copy(model, comm, partial(wrap, comm=comm, check=check), methods_to_run)


def _make_outermost(model: nn.Module, comm: Ranks, check: bool, checkpoint: Checkpoint) -> None:
    methods = methods_to_run, methods_written, methods_replaced
    make_outermost(model, comm, check, checkpoint, _Method, _is_known, *methods)


def _attach(conv: MessagePassing, name: str) -> None:
    engine = ShardedMessagePassing(conv, _title(conv, name))
    conv.propagate = engine.propagate  # type: ignore[method-assign]
    if conv.inspector.implements("edge_update"):
        conv.edge_updater = engine.edge_updater  # type: ignore[method-assign]


def _title(conv: MessagePassing, name: str) -> str:
    return f"{type(conv).__name__} ({name})" if name else type(conv).__name__


def _passes_messages(model: nn.Module) -> bool:
    return any(isinstance(module, MessagePassing) for module in model.modules())


def _is_known(module: nn.Module) -> bool:
    """Whether a module is one of PyG that is known to be exact."""
    kind = type(module)
    known = kind.__module__.startswith("torch_geometric.nn.conv.") or is_replaced(kind)
    return known or has_one_tensor_of_all_types(module)


def _keep_attached(model: nn.Module) -> None:
    """Refuse explanations; put the engine back where PyG took it out, as setting ``explain`` on a layer does."""
    for name, module in model.named_modules():
        if not isinstance(module, MessagePassing):
            continue
        if module.explain:
            raise no_explanations(f"{type(module).__name__} ({name}): ")
        if not isinstance(getattr(module.propagate, "__self__", None), ShardedMessagePassing):
            _attach(module, name)


class _Method(OutermostCall):
    """An outermost method, which turns graphs into ``edge_index``."""

    def __init__(
        self, model: nn.Module, comm: Ranks, followed: FollowedCalls, checkpoint: Checkpoint, sums: GradientSums,
        method: str, is_part: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(model, comm, followed, checkpoint, sums, method)
        self.is_part = is_part
        self._looked_for_tables = False
        self._signed: tuple[Any, list[str]] = (None, [])  # the method of the class, and the names of its arguments
        self.is_own = method in methods_written(model)
        before: Any = vars(model).get(method)  # by `adapt_hetero`, `adapt_methods` or an earlier `wrap`
        self.adapted: Any = before.adapted if isinstance(before, _Method) else before

    def is_known(self, module: nn.Module) -> bool:
        return _is_known(module) or super().is_known(module)

    def is_layer(self, module: nn.Module) -> bool:
        return isinstance(module, MessagePassing) or self.is_known(module)

    def called(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_part and (runs_as_it_is() or self.comm.forward is not None or not _has_graph((args, kwargs))):
            return self.alone(self._as_written, args, kwargs)
        return self._call(*args, **kwargs)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_own and (self.comm.forward is not None or not _has_graph((args, kwargs))):
            if _has_graph((args, kwargs)):
                args, kwargs = torch_private.tree_map(_edge_index_of, (args, kwargs))
            return self.alone(self._as_written, args, kwargs)
        dicts = [value for value in (*args, *kwargs.values()) if isinstance(value, dict)]
        with self.comm.unfollowed(keeps=False):
            args, kwargs = self._checked(args, kwargs)
        named = [holds_arguments(value) for value in (*args, *kwargs.values()) if isinstance(value, dict)]
        try:
            if not any(named):
                return self.run(self._computed, args, kwargs)
            out, assigned = self.run(self._computed_beside, args, kwargs)
            for value, is_named, found in zip(dicts, named, assigned):
                value.update(found if is_named else {})
            return out
        except RefusedError as error:
            if (told := explained(error)) is error:
                raise
            raise told from None

    def _checked(self, args: Any, kwargs: Any) -> Any:
        """The arguments as `_given` makes them. Refuse them, and the model, where they cannot be exact."""
        self.refuse_transforms()
        model = self.model
        refuse_sparse(self._by_name(args) | kwargs, _has_graph((args, kwargs)))
        _keep_attached(model)
        if is_called_by("torch_geometric.explain"):
            raise no_explanations()
        if not self.is_own and not self._looked_for_tables and _has_graph((args, kwargs)):  # it is collective
            self._looked_for_tables = True
            refuse_node_tables(model, self.comm, args, kwargs)
        args, kwargs = self._given(args, kwargs)
        leaves = torch_private.tree_leaves((args, kwargs))
        refuse_norms_of_some_nodes(model, leaves)
        refuse_whole_tensors(leaves)
        check_types((*args, *kwargs.values()), self.comm)
        return args, kwargs

    def _by_name(self, args: Any) -> dict[str, Any]:
        """The arguments that were given without their names, by them; those without any by their places."""
        written = getattr(type(self.model), self.method)
        if self._signed[0] is not written:
            self._signed = written, [*signature(written).parameters][1:]
        names = self._signed[1][: len(args)]
        return dict(zip([*names, *map(str, range(len(names), len(args)))], args))

    def _given(self, args: Any, kwargs: Any) -> Any:
        """The arguments with ``edge_index`` for graphs. A graph of several types stays itself where it is ``data``."""
        named = self._by_name(args)
        converted = tuple(_given_as(value, place == 0, name) for place, (name, value) in enumerate(named.items()))
        return converted, {name: _given_as(value, False, name) for name, value in kwargs.items()}

    def _computed(self, *args: Any, **kwargs: Any) -> Any:
        assert self.comm.forward is not None
        self.comm.forward.layers_are_given |= _has_layers((args, kwargs))
        out = torch_private.tree_map(_returned, self._as_written(*args, **kwargs))
        for value in (*args, *kwargs.values()):
            if isinstance(value, GraphArgument) and value.is_data:
                _keep_assigned(value)
        return out

    def _computed_beside(self, *args: Any, **kwargs: Any) -> Any:
        """What the method returns, and what it has assigned in each dict that it was given, as NequIP's modules do."""
        dicts = [value for value in (*args, *kwargs.values()) if isinstance(value, dict)]
        before = [dict(value) for value in dicts]
        out = self._computed(*args, **kwargs)
        assigned = [
            {name: one for name, one in value.items() if name not in old or one is not old[name]}
            for value, old in zip(dicts, before)
        ]
        return out, torch_private.tree_map(_returned, assigned)

    def _as_written(self, *args: Any, **kwargs: Any) -> Any:
        method = self.adapted or partial(getattr(type(self.model), self.method), self.model)
        return with_written(method, self.written)(*args, **kwargs)


_DATA = frozenset(["data", "batch", "hetero_data"])


def _has_graph(values: Any) -> bool:
    return any(isinstance(leaf, (ShardedGraph, ShardedEdgeIndex)) for leaf in torch_private.tree_leaves(values))


def _has_layers(values: Any) -> bool:
    leaves = torch_private.tree_leaves(values)
    return any(isinstance(leaf, ShardedEdgeIndex) and leaf.flow is not None for leaf in leaves)


def _returned(value: Any) -> Any:
    """A deferred edge result is computed while the ranks are still in step; a value that is not there is said so."""
    if isinstance(value, Poison):
        raise RefusedError(value.reason)
    return value.materialise() if isinstance(value, Lazy) else value


def _given_as(value: Any, is_first: bool, name: str) -> Any:
    """What a model is given for an argument of this name: a graph as ``data``, or ``edge_index`` for graphs."""
    if isinstance(value, ShardedHeteroGraph) and name in _DATA:
        return value
    if isinstance(value, ShardedGraph) and (is_first or name in _DATA):
        return value if isinstance(value, ShardedHeteroGraph) else _as_data(value)
    return torch_private.tree_map(_edge_index_of, value)


def _as_data(graph: ShardedGraph) -> GraphArgument:
    """`data`, with what earlier calls have assigned on it."""
    data: GraphArgument = GraphArgument.of(graph, is_data=True)
    vars(data).update(graph.assigned)
    return data


def _keep_assigned(data: GraphArgument) -> None:
    """Let what a model has assigned, as in ``data.x = h``, stay on the graph, as PyG's ``data`` would have it."""
    given, of_lists = vars(_as_data(data.graph)), vars(ShardedEdgeIndex)
    found = {name: value for name, value in vars(data).items() if value is not given.get(name) and name not in of_lists}
    data.graph.assigned = data.graph.assigned | found


def _edge_index_of(value: Any) -> Any:
    if isinstance(value, ShardedHeteroGraph):
        return value.edge_index_dict
    return GraphArgument.of(value) if isinstance(value, ShardedGraph) else value
