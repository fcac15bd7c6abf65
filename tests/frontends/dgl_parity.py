"""Parity of DGL code: on a whole DGLGraph in one process, and on what stands for one on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import dgl
import pytest
import torch
from torch import Tensor, nn

import shardpass as sp
from shardpass.frontends.dgl.graph import ShardedDGLGraph
from shardpass.testing import WholeGraph, awkward_graph
from shardpass.testing.parity import Caller

from .how_much import ONE_PART_EMPTY, assert_exact_in

Inputs = dict[str, Tensor]
Call = Callable[[nn.Module, Any, Inputs], Tensor]
"""``call(model, graph, inputs)``, with a DGLGraph or what stands for one."""
Case = tuple[Callable[[], nn.Module], Call]
GRAPH: WholeGraph = awkward_graph(channels=5, edge_channels=3)
_GENERATOR = torch.Generator().manual_seed(3)


def _with_edges(edge_index: Tensor, rows: Tensor) -> WholeGraph:
    return WholeGraph(
        GRAPH.num_nodes, edge_index, GRAPH.node, {name: field[rows] for name, field in GRAPH.edge.items()}
    )


_LOOPS = torch.arange(GRAPH.num_nodes)
_ENDS = torch.cat([GRAPH.edge_index, _LOOPS.expand(2, -1)], 1)
LOOPED = _with_edges(_ENDS, torch.cat([torch.arange(GRAPH.edge_index.size(1)), _LOOPS]))
"""With a self-loop at every node, for layers that refuse nodes without in-edges."""
_PROPER = (GRAPH.edge_index[0] != GRAPH.edge_index[1]).nonzero().view(-1)
LOOPLESS = _with_edges(GRAPH.edge_index[:, _PROPER], _PROPER)
"""Without self-loops, for layers that divide by the distance of the two ends."""
NUM_EDGES = _ENDS.size(1)
SIGNS = torch.randn(NUM_EDGES, generator=_GENERATOR, dtype=torch.float64)
BOUND = 1e-10


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    """For modules that import it: DGL makes some tensors in the default dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def dgl_graph(edges: Any, num_nodes: int = GRAPH.num_nodes) -> Any:
    """What a model is called with: a DGLGraph of an ``edge_index``, or what stands for one of a sharded graph."""
    if isinstance(edges, sp.ShardedGraph):
        return sp.dgl.graph(edges)
    return dgl.graph((edges[0], edges[1]), num_nodes=num_nodes)


def whole_graph(graph: WholeGraph = GRAPH) -> Any:
    """A DGLGraph of the whole graph, with its fields."""
    g = dgl_graph(graph.edge_index, graph.num_nodes)
    g.ndata.update(graph.node)
    g.edata.update(graph.edge)
    return g


def caller(call: Call, num_nodes: int = GRAPH.num_nodes) -> Caller:
    """`call` as the parity check wants it."""
    return lambda model, inputs, edges: call(model, dgl_graph(edges, num_nodes), inputs)


def own(rows: Tensor, g: Any) -> Tensor:
    """The own rows of a node tensor of the whole graph."""
    return rows[g.ndata[dgl.NID]] if dgl.NID in g.ndata else rows


def edges(rows: Tensor, g: Any) -> Tensor:
    """The own edges of an edge tensor of the whole graph."""
    return rows[g.edata[dgl.EID]] if dgl.EID in g.edata else rows[: g.num_edges()]


def onto_nodes(rows: Tensor, g: Any) -> Tensor:
    """Edge rows ``[num_edges, ...]`` summed at destinations as ``[num_nodes, columns]``, each with a factor of its own.

    No message passing: what is compared stays what it was.
    """
    is_sharded = isinstance(g, ShardedDGLGraph)
    ends = g.edges_of(None).dst_rows if is_sharded else g.edges()[1]
    flat = rows.reshape(rows.size(0), rows.shape[1:].numel())
    with g.comm.unfollowed() if is_sharded else nullcontext():
        out = flat.new_zeros(g.num_nodes(), flat.size(1)).index_add(0, ends, flat * edges(SIGNS, g).unsqueeze(1))
    if is_sharded:
        g.comm.note_result(out)
    return out


def assert_dgl_exact(
    case: Case,
    graph: WholeGraph = GRAPH,
    ranks: int = 3,
    modes: tuple[tuple[str, ...], ...] = ONE_PART_EMPTY,
    bound: float = BOUND,
    chunk_bytes: int = 1000,
) -> None:
    """A case is exact on the first, second, ... assignment of owners in the first, second, ... of `modes`.

    Errors of a tensor are relative to its largest entry, if that is above 1.
    """
    make, call = case
    torch.manual_seed(0)
    options, call = sp.Options(chunk_bytes=chunk_bytes), caller(call, graph.num_nodes)
    assert_exact_in(modes, make().double(), graph, call, sp.dgl.wrap, ranks, options, bound=bound, relative=True)
