"""DGL's graphs, and its partition directories read without it."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from dgl_helpers import (
    EDGES,
    NODES,
    assert_division,
    assert_new_ids,
    hetero,
    homogeneous,
    make,
    write,
)  # fmt: skip
from store_helpers import assert_same, rebuilt

import shardpass as sp
from shardpass.data import EDGE, NODE, open_store, partition, read
from shardpass.testing import run

dgl = pytest.importorskip("dgl")


# ---- DGLGraph


class TestGraph:
    def test_homogeneous(self, tmp_path: Path) -> None:
        g = homogeneous()
        graph = read(g)
        assert graph.num_nodes == {NODE: NODES}
        assert list(graph.edges) == [EDGE]
        src, dst = g.edges(order="eid")
        assert torch.equal(graph.edges[EDGE].src, src)
        assert torch.equal(graph.edges[EDGE].dst, dst)
        assert dict(graph.node_fields[NODE]).keys() == g.ndata.keys()
        assert dict(graph.edge_fields[EDGE]).keys() == g.edata.keys()
        for found, given in ((graph.node_fields[NODE], g.ndata), (graph.edge_fields[EDGE], g.edata)):
            for name, field in found.items():
                assert field.dtype == given[name].dtype
                assert torch.equal(field, given[name])
        partition(g, tmp_path / "store", 3, method="random")
        assert_same(rebuilt(open_store(tmp_path / "store"), 2), graph)

    def test_hetero(self, tmp_path: Path) -> None:
        g = hetero()
        graph = read(g)
        assert graph.num_nodes == {kind: g.num_nodes(kind) for kind in g.ntypes}
        assert list(graph.edges) == g.canonical_etypes
        for kind in g.canonical_etypes:
            assert torch.equal(graph.edges[kind].src, g.edges(etype=kind)[0])
            assert torch.equal(graph.edges[kind].dst, g.edges(etype=kind)[1])
            assert torch.equal(graph.edge_fields[kind]["w"], g.edges[kind].data["w"])
        assert list(graph.edge_fields["user", "knows", "user"]) == ["w", "train_mask_20"]
        assert list(graph.node_fields["item"]) == ["feat", "price/in euro"]
        partition(g, tmp_path / "store", 3, method="random")
        assert_same(rebuilt(open_store(tmp_path / "store"), 2), graph)

    def test_int32(self) -> None:
        g = homogeneous(torch.int32)
        assert g.idtype == torch.int32
        assert read(g).edges[EDGE].src.dtype == torch.int32
        assert_same(read(g), read(homogeneous()))

    @pytest.mark.parametrize("formats", ["coo", "csr", "csc", ["csr", "csc"]])
    def test_edges_have_the_order_of_their_ids(self, formats: Any) -> None:
        g = homogeneous()
        assert_same(read(g.formats(formats)), read(g))
        g.create_formats_()
        assert_same(read(g), read(homogeneous()))

    def test_names_of_the_user_stay(self) -> None:
        g = dgl.heterograph({("paper", "cites", "paper"): ([0, 1], [1, 2])})
        assert g.is_homogeneous
        assert read(g).num_nodes == {"paper": 3}
        assert list(read(g).edges) == [("paper", "cites", "paper")]

    def test_no_edges_and_drop(self) -> None:
        g = dgl.graph(([], []), num_nodes=3)
        g.ndata["feat"] = torch.rand(3, 1)
        g.ndata["other"] = torch.rand(3, 1)
        graph = read(g, drop=["other"])
        assert graph.num_edges == {EDGE: 0}
        assert list(graph.node_fields[NODE]) == ["feat"]

    def test_refusals(self) -> None:
        g = homogeneous()
        with pytest.raises(ValueError, match="is a block"):
            read(dgl.to_block(g))
        batch = dgl.batch([g, g])
        with pytest.raises(ValueError, match=r"a batch of 2 graphs; pass one of dgl\.unbatch"):
            read(batch)
        batch.set_batch_num_nodes(torch.tensor([batch.num_nodes()]))  # as the message says
        batch.set_batch_num_edges(torch.tensor([batch.num_edges()]))
        assert read(batch).num_nodes == {NODE: 2 * NODES}
        share = type("ShardedGraph", (dgl.DGLGraph,), {"__module__": "shardpass.frontends.dgl"})
        with pytest.raises(ValueError, match="partitioned already; pass the whole graph"):
            read(share.__new__(share))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", ["homogeneous", "hetero"])
def test_partition_and_load(kind: str, ranks: int, tmp_path: Path) -> None:
    g = make(kind)
    sp.partition(g, tmp_path / "store", parts=2, method="random")
    shares = run(loaded, ranks, args=(str(tmp_path / "store"),))
    whole = read(g)
    for node_type, count in whole.num_nodes.items():
        ids = torch.cat([share["node_ids"][node_type] for share in shares])
        assert torch.equal(ids.sort().values, torch.arange(count))
        for name, field in whole.node_fields[node_type].items():
            found = torch.cat([share["nodes"][node_type][name] for share in shares])
            assert found.dtype == field.dtype
            assert torch.equal(found, field[ids])
    for edge_type, arrays in whole.edges.items():
        assert sum(len(share["edges"][edge_type]["w"]) for share in shares) == len(arrays.src)
        for share in shares:
            ids = share["edge_ids"][edge_type]
            assert torch.equal(share["edges"][edge_type]["w"], whole.edge_fields[edge_type]["w"][ids])


def loaded(comm: Any, path: str) -> dict[str, Any]:
    graph = sp.load(path, comm)
    return {
        "node_ids": graph.node_ids_dict,
        "nodes": {kind: dict(graph.fields_of(kind)) for kind in graph.node_types},
        "edge_ids": {kind: relation.edge_ids for kind, relation in graph.relations.items()},
        "edges": {kind: dict(relation.fields) for kind, relation in graph.relations.items()},
    }


# ---- partition directories


LAYOUTS = [None, "coo", "csr", "csc", ["coo", "csr", "csc"], ["csr", "csc"]]


class TestPartition:
    @pytest.mark.parametrize("formats", LAYOUTS, ids=str)
    @pytest.mark.parametrize("method", ["random", "metis"])
    @pytest.mark.parametrize("kind", ["homogeneous", "hetero"])
    def test_the_same_graph(self, kind: str, method: str, formats: Any, tmp_path: Path) -> None:
        written = write(tmp_path, make(kind), method=method, graph_formats=formats)
        graph = read(written.path)
        assert_new_ids(written, graph)
        assert_division(written, graph)
        assert graph.source == f"some name.json (DGL partition, {method}; DGL's new node ids, DGL's new edge ids)"

    @pytest.mark.parametrize("kind", ["homogeneous", "hetero"])
    @pytest.mark.parametrize("options", [{"parts": 1}, {"parts": 2, "num_hops": 2}], ids=str)
    def test_one_part_and_two_hops(self, kind: str, options: dict[str, int], tmp_path: Path) -> None:
        written = write(tmp_path, make(kind), **options)
        graph = read(written.path)
        assert_new_ids(written, graph)
        assert_division(written, graph)

    def test_one_named_type(self, tmp_path: Path) -> None:
        g = dgl.heterograph({("paper", "cites", "paper"): torch.randint(20, (2, 90)).unbind()}, {"paper": 20})
        written = write(tmp_path, g, 2)
        assert_new_ids(written, read(written.path))

    def test_trainers(self, tmp_path: Path) -> None:
        written = write(tmp_path, homogeneous(), 2, "metis", num_trainers_per_machine=2)
        graph = read(written.path)
        trainers = graph.node_fields[NODE].pop("trainer_id")
        assert torch.equal(trainers // 2, graph.division.part_of[NODE].long())
        graph.edge_fields[EDGE].pop("trainer_id")
        written.g = homogeneous()  # partition_graph added the trainers to the other
        assert_new_ids(written, graph)

    def test_the_partition_is_kept(self, tmp_path: Path) -> None:
        written = write(tmp_path / "dgl", hetero(), 2)
        graph = read(written.path)
        manifest = sp.partition(written.path, tmp_path / "store")
        assert manifest.num_parts == 2 and manifest.method == "given"
        assert_same(rebuilt(open_store(tmp_path / "store"), 2), graph)
        shares = run(loaded, 2, args=(str(tmp_path / "store"),))
        for part, share in enumerate(shares):
            g, fields = dgl.distributed.load_partition(str(written.path), part)[:2]
            assert sum(map(len, share["node_ids"].values())) == int(g.ndata["inner_node"].sum())
            for kind, ids in share["node_ids"].items():
                rows = fields[f"{kind}/feat"]
                assert sorted(share["nodes"][kind]["feat"].tolist()) == sorted(rows.tolist())
                assert (graph.division.part_of[kind][ids] == part).all()

    def test_an_assignment_needs_its_number_of_parts(self, tmp_path: Path) -> None:
        written = write(tmp_path / "dgl", hetero(), 3)
        graph = read(written.path)
        with pytest.raises(ValueError, match="how many parts"):
            sp.partition(written.g, tmp_path / "c")
        with pytest.raises(ValueError, match="pass parts"):
            sp.partition(written.path, tmp_path / "c", assignment=graph.division.part_of)

    def test_another_partition_of_the_files(self, tmp_path: Path) -> None:
        written = write(tmp_path / "dgl", homogeneous(), 2)
        sp.partition(written.path, tmp_path / "store", 4, method="random")
        store = open_store(tmp_path / "store")
        assert store.num_parts == 4
        assert_same(rebuilt(store, 2), read(str(written.path)))
        assert_new_ids(written, read(written.path))
        graph = read(written.path, drop=["feat"])
        assert "feat" not in graph.node_fields[NODE]

    def test_without_dgl(self, tmp_path: Path) -> None:
        written = write(tmp_path, homogeneous(), 2)
        code = f"""
import sys
from shardpass.data import read
assert read({str(written.path)!r}).num_edges[("node", "to", "node")] == {EDGES}
assert "dgl" not in sys.modules
"""
        subprocess.run([sys.executable, "-c", code], check=True, timeout=480)
