"""Parity: a model on the whole graph in one process against the same model on a sharded graph."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shardpass.core.graphs import ShardedGraph, ShardedHeteroGraph
from shardpass.core.ranks import Options, Ranks, plain_of
from shardpass.core.sharding import EDGE, NODE, NodeType
from shardpass.core.training import sync_gradients
from shardpass.testing.graphs import WholeGraph
from shardpass.testing.hetero import WholeHeteroGraph, sharded
from shardpass.testing.run import run

Tensors = dict[Any, dict[str, Tensor]]
Caller = Callable[[nn.Module, dict[str, Tensor], Any], Tensor]
HeteroCaller = Callable[[nn.Module, Tensors, Any], dict[NodeType, Tensor]]
"""``call(model, fields, edge_index_dict)``: `fields` by node or edge type, then name; rows by node type come back."""


@dataclass
class Outcome:
    """What one evaluation gave: the output, the gradients of inputs and parameters, and the buffers afterwards."""

    output: Tensor | dict[NodeType, Tensor]
    inputs: dict[str, Tensor] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)

    def tensors(self) -> dict[str, Tensor]:
        """All tensors, by names that tell them apart."""
        found = {f"output of {kind}" if kind else "output": rows for kind, rows in _by_kind(self).items()}
        for part in ("inputs", "parameters", "buffers"):
            found |= {f"{part}.{name}": tensor for name, tensor in getattr(self, part).items()}
        return found


def cotangent(like: Tensor) -> Tensor:
    """A fixed random cotangent in the shape of `like`."""
    generator = torch.Generator().manual_seed(7)
    return torch.randn(like.shape, generator=generator, dtype=torch.float64).to(like.dtype)


def evaluate_whole(
    model: nn.Module, graph: WholeGraph | WholeHeteroGraph, call: Caller | HeteroCaller, order: int = 1
) -> Outcome:
    """`model` on the whole graph, forward and backward, in this process; `order` as in `assert_exact`."""
    model = copy.deepcopy(model)
    typed, has_types = _by_type(graph)
    fields = _leaves({**typed.node, **typed.edge})
    edges = dict(typed.edges) if has_types else typed.edges[EDGE]
    outputs = _called(call, model, fields, edges)
    loss = torch.stack([(out * cotangent(out)).sum() for out in outputs.values()]).sum()
    inputs = _differentiable(fields, has_types)
    _of_order(order, loss, [(tensor, cotangent(tensor)) for _, _, tensor in inputs]).backward()
    return _outcome(model, outputs, inputs)


def _of_order(order: int, loss: Tensor, inputs: list[tuple[Tensor, Tensor]]) -> Tensor:
    """`loss` and its derivatives by inputs, each of them in a direction."""
    for _ in range(order - 1):
        found = torch.autograd.grad(loss, [tensor for tensor, _ in inputs], create_graph=True, allow_unused=True)
        slopes = [(grad * way).sum() for grad, (_, way) in zip(found, inputs) if grad is not None]
        loss = torch.stack([loss, *slopes]).sum()
    return loss


def evaluate_sharded(
    model: nn.Module,
    graph: WholeGraph | WholeHeteroGraph,
    call: Caller | HeteroCaller,
    owners: Any,
    ranks: int,
    wrap: Callable[[nn.Module, Ranks], nn.Module],
    options: Options,
    whole: Outcome,
    order: int = 1,
) -> Outcome:
    """`model` on `ranks` in-process ranks: rows put back in the original order."""
    results = run(evaluate_rank, ranks, args=(model, graph, call, owners, wrap, options, whole, order))
    first, _, _ = results[0]
    outputs, inputs = (
        {name: torch.full_like(t, float("nan")) for name, t in of.items()} for of in (_by_kind(whole), whole.inputs)
    )
    for mine, output_rows, input_rows in results:
        for table, found, rows in ((outputs, _by_kind(mine), output_rows), (inputs, mine.inputs, input_rows)):
            for name, values in found.items():
                table[name][rows[name]] = values
    return Outcome(_as_returned(outputs), inputs, first.parameters, first.buffers)


def evaluate_rank(
    comm: Ranks,
    model: nn.Module,
    graph: WholeGraph | WholeHeteroGraph,
    call: Caller | HeteroCaller,
    owners: Any,
    wrap: Callable[[nn.Module, Ranks], nn.Module],
    options: Options,
    whole: Outcome,
    order: int = 1,
) -> tuple[Outcome, dict[Any, Tensor], dict[str, Tensor]]:
    """`model` on this rank's share of `graph`, with the original ids of the rows of outputs and inputs. Collective."""
    typed, has_types = _by_type(graph)
    mine = wrap(copy.deepcopy(model), comm)
    share = sharded(typed, owners if has_types else {NODE: owners}, comm, options)
    fields, ids = _own(share)
    outputs = _called(call, mine, fields, share)
    if not has_types:
        ids[""] = share.node_ids if outputs[""].size(0) == share.num_own_nodes else share.edge_ids
    losses = [(outputs[kind] * cotangent(out)[ids[kind]]).sum() for kind, out in _by_kind(whole).items()]
    inputs = _differentiable(fields, has_types)
    given: Tensors = {**typed.node, **typed.edge}
    ways = [cotangent(given[kind][name.removesuffix(f" of {kind}")])[ids[kind]] for kind, name, _ in inputs]
    _of_order(order, torch.stack(losses).sum(), [(t, way) for (_, _, t), way in zip(inputs, ways)]).backward()
    sync_gradients(mine, comm)  # if it is not wrapped
    return _outcome(mine, outputs, inputs), ids, {name: ids[kind] for kind, name, _ in inputs}


def differences(whole: Outcome, sharded: Outcome, relative: bool = False) -> dict[str, float]:
    """The largest absolute error of every tensor of `sharded` against `whole`. A NaN counts as infinite.

    With `relative`, it is divided by the largest entry of the tensor, if that is above 1.
    """
    found = sharded.tensors()
    return {name: _error(tensor, found[name], relative) for name, tensor in whole.tensors().items()}


def gradient_of(tensor: Tensor) -> Tensor:
    """A copy of the gradient of `tensor`; zeros if it has none."""
    return torch.zeros_like(tensor) if tensor.grad is None else plain_of(tensor.grad.clone())


def _by_type(graph: WholeGraph | WholeHeteroGraph) -> tuple[WholeHeteroGraph, bool]:
    """The graph by type, and whether it was so."""
    return (graph.by_type(), False) if isinstance(graph, WholeGraph) else (graph, True)


def _own(sharded: ShardedGraph) -> tuple[Tensors, dict[Any, Tensor]]:
    """Leaves of the fields of this rank's nodes and edges by type, and the original ids of their rows."""
    relations = sharded.relations
    fields: Tensors = {kind: dict(sharded.fields_of(kind)) for kind in sharded.node_types}
    fields |= {kind: dict(relation.fields) for kind, relation in relations.items()}
    ids: dict[Any, Tensor] = {**sharded.node_ids_dict}
    ids |= {kind: relation.edge_ids for kind, relation in relations.items()}
    return _leaves(fields), ids


def _called(call: Any, model: nn.Module, fields: Tensors, edges: Any) -> dict[Any, Tensor]:
    """The rows that the model returns by node type; of a graph without types, all rows under an empty name."""
    if isinstance(edges, (dict, ShardedHeteroGraph)):
        return {kind: rows for kind, rows in call(model, fields, edges).items() if rows is not None}
    return {"": call(model, {**fields[NODE], **fields[EDGE]}, edges)}


def _as_returned(outputs: dict[Any, Tensor]) -> Any:
    return outputs.get("", outputs)


def _by_kind(outcome: Outcome) -> dict[Any, Tensor]:
    """The inverse of `_as_returned`."""
    return outcome.output if isinstance(outcome.output, dict) else {"": outcome.output}


def _outcome(model: nn.Module, outputs: dict[Any, Tensor], inputs: list[tuple[Any, str, Tensor]]) -> Outcome:
    return Outcome(
        _as_returned({kind: plain_of(out.detach()) for kind, out in outputs.items()}),
        {name: gradient_of(t) for _, name, t in inputs},
        {name: gradient_of(p) for name, p in model.named_parameters()},
        {name: b.clone() for name, b in model.named_buffers()},
    )


def _leaves(tensors: Tensors) -> Tensors:
    return {
        kind: {name: t.detach().clone().requires_grad_(t.is_floating_point()) for name, t in fields.items()}
        for kind, fields in tensors.items()
    }


def _differentiable(fields: Tensors, has_types: bool) -> list[tuple[Any, str, Tensor]]:
    """The type of each field, a name that tells it from those of other types, and the field."""
    return [
        (kind, f"{name} of {kind}" if has_types else name, t)
        for kind, own in fields.items()
        for name, t in own.items()
        if t.requires_grad
    ]


def _error(whole: Tensor, found: Tensor, relative: bool) -> float:
    if whole.shape != found.shape:
        return float("inf")
    if not whole.numel():
        return 0.0
    error = float((whole.detach().double() - found.detach().double()).abs().max())
    error /= max(1.0, float(whole.detach().abs().max())) if relative else 1.0
    return error if error == error else float("inf")
