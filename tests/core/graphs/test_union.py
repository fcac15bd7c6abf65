"""Several relations as one edge list: the right edges, made once, refused where they do not fit."""

import pytest
import torch

from shardpass.core.exchange import halo_fetch
from shardpass.core.graphs import Piece, ShardedEdgeIndex, union
from shardpass.errors import RefusedError
from shardpass.testing import awkward_hetero_graph, hetero_assignments, run, shard_hetero_in_memory

GRAPH = awkward_hetero_graph()
KINDS = list(GRAPH.edges)


def pieces_of(graph):
    """All relations over one tensor of all node types: ``(pieces, own rows)``."""
    starts, total = {}, 0
    for kind in graph.node_types:
        starts[kind] = total
        total += graph[kind].num_own_nodes
    edges = graph.edge_index_dict
    return [Piece(edges[kind], starts[kind[0]], starts[kind[2]]) for kind in KINDS], total


def on_ranks(ranks, work, where="random"):
    owners = hetero_assignments(GRAPH, ranks)[where]
    return run(lambda comm: work(comm, shard_hetero_in_memory(GRAPH, owners, comm)), ranks)


@pytest.mark.parametrize("where", ["random", "empty part", "types apart"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_union_holds_the_edges_of_its_pieces_in_order(ranks, where):
    def work(comm, graph):
        pieces, total = pieces_of(graph)
        out = union(pieces, total, total, "test")
        assert isinstance(out, ShardedEdgeIndex) and out.shards.num_edges == graph.num_own_edges
        kinds = torch.cat([torch.full((graph[kind].num_own_nodes,), i) for i, kind in enumerate(graph.node_types)])
        ids = torch.stack([kinds, torch.cat(list(graph.node_ids_dict.values()))], dim=1)
        src, dst = out.plain
        found = torch.stack([halo_fetch(ids, out.plan, "ids")[src], ids[dst]])
        expected = []
        for kind in KINDS:
            ends = GRAPH.edges[kind][:, graph[kind].edge_ids]
            types = [list(GRAPH.num_nodes).index(kind[0]), list(GRAPH.num_nodes).index(kind[2])]
            expected.append(torch.stack([torch.stack([torch.full_like(e, t), e], 1) for t, e in zip(types, ends)]))
        assert torch.equal(found, torch.cat(expected, dim=1))
        return out.plan.num_halo, graph.num_halo

    for halo_of_union, halo in on_ranks(ranks, work, where):
        assert halo_of_union <= halo  # a row that two relations need travels once


def test_a_union_is_made_once_but_for_lists_changed_in_forward():
    def work(comm, graph):
        pieces, total = pieces_of(graph)
        first = union(pieces, total, total, "test")
        assert union(pieces, total, total, "test") is first
        assert union(pieces, total + 1, total + 1, "test") is not first
        kept = pieces[0].edge_index[:, torch.arange(pieces[0].edge_index.size(1)) > 0]
        changed = [Piece(kept, 0, 0), *pieces[1:]]
        assert union(changed, total, total, "test") is not union(changed, total, total, "test")

    on_ranks(2, work)


def test_what_does_not_fit_is_refused():
    def work(comm, graph):
        pieces, total = pieces_of(graph)
        with pytest.raises(ValueError, match="does not fit at rows"):
            union(pieces, total - 1, total, "test")
        with pytest.raises(RefusedError, match="in their own direction"):
            union([Piece(pieces[0].edge_index.flip(0), 0, 0)], total, total, "test")

    on_ranks(2, work, "types apart")
