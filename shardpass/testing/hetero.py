"""Small awkward graphs of several types, sharding one in memory, and parity of models on them: for tests."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shardpass.core.graphs import OwnFields, ShardedGraph, ShardedHeteroGraph, build_relation
from shardpass.core.ranks import Options, Ranks
from shardpass.core.sharding import EDGE, NODE, EdgeType, NodeType, Ownership
from shardpass.testing.graphs import WholeGraph, shard_in_memory
from shardpass.testing.parity import Outcome, cotangent, gradient_of
from shardpass.testing.run import run

Tensors = dict[Any, dict[str, Tensor]]
HeteroCaller = Callable[[nn.Module, Tensors, Any], dict[NodeType, Tensor]]
"""``call(model, fields, edge_index_dict)``: `fields` by node or edge type, then name; rows by node type come back."""


@dataclass
class WholeHeteroGraph:
    """A graph of several types in one piece. `edges`: ``[2, E]`` each; `node` and `edge`: fields by type, then name."""

    num_nodes: dict[NodeType, int]
    edges: dict[EdgeType, Tensor]
    node: dict[NodeType, dict[str, Tensor]] = field(default_factory=dict)
    edge: dict[EdgeType, dict[str, Tensor]] = field(default_factory=dict)

    @property
    def metadata(self) -> tuple[list[NodeType], list[EdgeType]]:
        return list(self.num_nodes), list(self.edges)


def awkward_hetero_graph(channels: int = 5, edge_channels: int = 3, seed: int = 0) -> WholeHeteroGraph:
    """Three node and six edge types in float64, every field on every type.

    A type with two nodes, an edge type without edges, self-loops, duplicate edges, hubs, isolated nodes, ties in ``x``.
    """
    generator = torch.Generator().manual_seed(seed)
    num_nodes = {"paper": 23, "author": 14, "venue": 2}
    counts: dict[EdgeType, int] = {
        ("paper", "cites", "paper"): 60,
        ("author", "writes", "paper"): 50,
        ("paper", "by", "author"): 40,
        ("venue", "prints", "paper"): 15,
        ("paper", "in", "venue"): 20,
        ("author", "knows", "author"): 0,
    }
    edges = {}
    for (src, _, dst), count in counts.items():
        ends = [torch.randint(0, num_nodes[kind], (count,), generator=generator) for kind in (src, dst)]
        for end, kind in zip(ends, (src, dst)):
            end[end >= num_nodes[kind] - 2] = 0  # the last two are isolated, the first one a hub
        edges[src, _, dst] = torch.stack(ends)
    edges["paper", "cites", "paper"][:, :6] = torch.arange(6)  # self-loops
    edges["author", "writes", "paper"][:, :5] = edges["author", "writes", "paper"][:, 5:10]  # duplicates
    edges["paper", "in", "venue"][1, 10:] = 1

    def made(rows: int, width: int) -> Tensor:
        return torch.randn(rows, width, generator=generator, dtype=torch.float64)

    node = {kind: {"x": made(count, channels)} for kind, count in num_nodes.items()}
    node["paper"]["x"][3:12] = node["paper"]["x"][3:12].round()
    edge = {k: {"edge_attr": made(n, edge_channels), "edge_weight": made(n, 1)[:, 0].abs()} for k, n in counts.items()}
    return WholeHeteroGraph(num_nodes, edges, node, edge)


def hetero_assignments(graph: WholeHeteroGraph, ranks: int) -> dict[str, dict[NodeType, Tensor]]:
    """Owners of the nodes by type: random; with an empty rank; each type on ranks of its own as far as they go."""
    generator = torch.Generator().manual_seed(ranks)

    def drawn(limit: int) -> dict[NodeType, Tensor]:
        return {kind: torch.randint(0, limit, (n,), generator=generator) for kind, n in graph.num_nodes.items()}

    found = {"random": drawn(ranks)}
    if ranks > 1:
        found["empty part"] = drawn(ranks - 1)
        found["types apart"] = {
            kind: torch.full((n,), i % ranks) for i, (kind, n) in enumerate(graph.num_nodes.items())
        }
    return found


def shard_hetero_in_memory(
    graph: WholeHeteroGraph, owners: dict[NodeType, Tensor], comm: Ranks, options: Options | None = None
) -> ShardedHeteroGraph:
    """This rank's share of `graph`, node i of a type owned by rank ``owners[type][i]``. Collective, same arguments."""
    options = options or Options()
    ownership, node_ids, new_ids, fields = {}, {}, {}, {}
    for kind, owner in owners.items():
        order = torch.argsort(owner, stable=True)
        ownership[kind] = Ownership.from_counts(torch.bincount(owner, minlength=comm.size).tolist())
        new_ids[kind] = torch.empty_like(order)
        new_ids[kind][order] = torch.arange(order.numel())
        first, last = ownership[kind].offsets[comm.rank : comm.rank + 2]
        node_ids[kind] = order[first:last]
        own = {name: t[node_ids[kind]] for name, t in graph.node.get(kind, {}).items()}
        fields[kind] = OwnFields(own, lambda t: t)
    relations = {}
    for edge_type, ends in graph.edges.items():
        src, _, dst = edge_type
        edge_ids = (owners[dst][ends[1]] == comm.rank).nonzero().view(-1)
        own = {name: t[edge_ids] for name, t in graph.edge.get(edge_type, {}).items()}
        dst_rows = new_ids[dst][ends[1, edge_ids]] - ownership[dst].offsets[comm.rank]
        num_dst = ownership[dst].num_own(comm.rank)
        relations[edge_type] = build_relation(
            comm, ownership[src], new_ids[src][ends[0, edge_ids]], dst_rows, num_dst, edge_ids, own, options, (src, dst)
        )
    classes = {kind: int(own["y"].max()) + 1 for kind, own in graph.node.items() if "y" in own}
    totals = {kind: ends.size(1) for kind, ends in graph.edges.items()}
    return ShardedHeteroGraph(
        comm, options, ownership, node_ids, fields, relations, total_edges=totals, num_classes=classes
    )


def evaluate_whole_hetero(model: nn.Module, graph: WholeHeteroGraph, call: HeteroCaller) -> Outcome:
    """`model` on the whole graph, forward and backward, in this process; see `differences`."""
    model = copy.deepcopy(model)
    inputs = _leaves({**graph.node, **graph.edge})
    outputs = {k: v for k, v in call(model, inputs, dict(graph.edges)).items() if v is not None}
    torch.stack([(out * cotangent(out)).sum() for out in outputs.values()]).sum().backward()
    whole = Outcome(torch.cat([out.detach().reshape(-1) for out in outputs.values()]))
    whole.inputs = _grads(inputs) | {f"output of {kind}": out.detach() for kind, out in outputs.items()}
    whole.parameters = {name: gradient_of(p) for name, p in model.named_parameters()}
    whole.buffers = {name: b.clone() for name, b in model.named_buffers()}
    return whole


def evaluate_sharded_hetero(
    model: nn.Module,
    graph: WholeHeteroGraph,
    call: HeteroCaller,
    owners: dict[NodeType, Tensor],
    ranks: int,
    wrap: Callable[[nn.Module, Ranks], nn.Module],
    options: Options,
    whole: Outcome,
) -> Outcome:
    """`model` on `ranks` in-process ranks: rows put back in the original order, parameter gradients summed."""
    kinds = [name.removeprefix("output of ") for name in whole.inputs if name.startswith("output of ")]
    cotangents = {kind: cotangent(whole.inputs[f"output of {kind}"]) for kind in kinds}

    def work(comm: Ranks) -> tuple[Any, ...]:
        mine = wrap(copy.deepcopy(model), comm)
        sharded = shard_hetero_in_memory(graph, owners, comm, options)
        types: list[Any] = [*graph.num_nodes, *graph.edges]
        inputs = _leaves({kind: dict(sharded[kind]) for kind in types})
        outputs = {k: v for k, v in call(mine, inputs, sharded).items() if v is not None}
        rows = sharded.node_ids_dict
        torch.stack([(outputs[k] * cotangents[k][rows[k]]).sum() for k in kinds]).sum().backward()
        found = _placed(inputs, sharded)
        found |= {f"output of {kind}": (rows[kind], outputs[kind].detach()) for kind in outputs}
        parameters = {name: gradient_of(p) for name, p in mine.named_parameters()}
        return found, parameters, {name: b.clone() for name, b in mine.named_buffers()}

    results = run(work, ranks)
    out = Outcome(whole.output)
    out.inputs = {name: torch.full_like(t, float("nan")) for name, t in whole.inputs.items()}
    out.buffers = results[0][2]
    for found, parameters, _ in results:
        for name, (row_ids, rows_found) in found.items():
            out.inputs[name][row_ids] = rows_found
        for name, grad in parameters.items():
            out.parameters[name] = out.parameters[name] + grad if name in out.parameters else grad
    return out


def _placed(inputs: Tensors, graph: ShardedHeteroGraph) -> dict[str, tuple[Tensor, Tensor]]:
    ids = {kind: graph[kind].node_ids if kind in graph.node_types else graph[kind].edge_ids for kind in inputs}
    return {
        f"{name} of {kind}": (ids[kind], gradient_of(tensor))
        for kind, fields in inputs.items()
        for name, tensor in fields.items()
        if tensor.requires_grad
    }


def _leaves(tensors: Tensors) -> Tensors:
    return {
        kind: {name: t.detach().clone().requires_grad_(t.is_floating_point()) for name, t in fields.items()}
        for kind, fields in tensors.items()
    }


def _grads(inputs: Tensors) -> dict[str, Tensor]:
    return {
        f"{n} of {kind}": gradient_of(t)
        for kind, fields in inputs.items()
        for n, t in fields.items()
        if t.requires_grad
    }


def shard_by_type(
    num_nodes: dict[Any, int],
    edges: dict[Any, Tensor],
    owners: dict[Any, Tensor],
    comm: Ranks,
    options: Options,
) -> ShardedGraph:
    """This rank's share of a graph without fields, given by type; a homogeneous one is the graph of one type."""
    if list(edges) == [EDGE]:
        return shard_in_memory(WholeGraph(num_nodes[NODE], edges[EDGE]), owners[NODE], comm, options)
    return shard_hetero_in_memory(WholeHeteroGraph(num_nodes, edges), owners, comm, options)
