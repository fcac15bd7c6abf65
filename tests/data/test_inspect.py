"""`inspect` counts what a brute-force count finds."""

import pytest
from store_helpers import awkward, bipartite

from shardpass.data import inspect, merge_parts, open_store, partition, parts_of_rank, verify


@pytest.mark.parametrize("make", [awkward, bipartite])
@pytest.mark.parametrize("ranks", [None, 1, 2, 3, 4])
def test_counts(tmp_path, make, ranks):
    graph = make().validate()
    path = tmp_path / "store"
    partition(graph, path, 4, method="random", seed=2)
    report = inspect(path, ranks)
    store = open_store(path)
    assert len(report.groups) == (ranks or 4)
    for rank, group in enumerate(report.groups):
        parts = parts_of_rank(4, ranks or 4, rank)
        data = merge_parts(store, ranks or 4, rank)
        own = {kind: set(ids.tolist()) for kind, ids in data.node_ids.items()}
        assert group.parts == parts
        assert group.nodes == {kind: len(ids) for kind, ids in own.items()}
        for kind, arrays in graph.edges.items():
            edges = [(s, d) for s, d in zip(arrays.src.tolist(), arrays.dst.tolist()) if d in own[kind[2]]]
            remote = [s for s, _ in edges if s not in own[kind[0]]]
            assert group.edges[kind] == len(edges)
            assert group.cut_edges[kind] == len(remote)
            assert group.halo_rows[kind] == len(set(remote))
        fields = [*data.node_fields.values(), *data.edge_fields.values()]
        stored = sum(mapping[name].nbytes for mapping in fields for name in mapping)
        assert group.feature_bytes == stored
        assert group.structure_bytes > 0
        assert group.num_bytes == group.feature_bytes + group.structure_bytes
    assert sum(group.num_nodes for group in report.groups) == sum(graph.num_nodes.values())
    if ranks in (None, 4):
        assert report.num_cut_edges == sum(report.manifest.cut_edges.values())
    if ranks == 1:
        assert report.num_halo_rows == report.num_cut_edges == 0
        assert report.balance("num_halo_rows") == report.balance("num_nodes") == 1.0


def test_balance(tmp_path):
    partition(awkward(), tmp_path / "store", 2, assignment=[0] * 6 + [1] * 2)
    assert inspect(tmp_path / "store").balance("num_nodes") == 1.5


def test_more_ranks_than_parts(tmp_path):
    partition(awkward(), tmp_path / "store", 2, method="range")
    with pytest.raises(ValueError, match="3 ranks, but the store has 2 parts"):
        inspect(tmp_path / "store", 3)


def test_verify_reports_progress(tmp_path):
    manifest = partition(awkward(), tmp_path / "store", 2, method="range")
    calls = []
    assert verify(tmp_path / "store", lambda *call: calls.append(call)) == manifest
    assert calls == [("verify", 0, 2), ("verify", 1, 2), ("verify", 2, 2)]
