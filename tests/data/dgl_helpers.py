"""Graphs of DGL, partition directories written by it, and what their files should say."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from store_helpers import values

from shardpass.data import NODE, RawGraph, read

dgl = pytest.importorskip("dgl")

NODE_DTYPES = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.float16, torch.bfloat16, torch.float64]
NODES, EDGES = 60, 400


def homogeneous(idtype: torch.dtype = torch.int64) -> Any:
    """A multigraph with self-loops, nodes without edges, and fields of many dtypes."""
    torch.manual_seed(0)
    src, dst = torch.randint(NODES - 4, (2, EDGES), dtype=idtype)
    src[:5], dst[:5] = 7, 7
    g = dgl.graph((src, dst), num_nodes=NODES)
    g.ndata["feat"] = torch.randn(NODES, 3)
    g.ndata["label"] = torch.arange(NODES) % 5
    g.ndata["train_mask"] = torch.arange(NODES) % 2 == 0
    for dtype in NODE_DTYPES:
        g.ndata[f"of {dtype}"] = values(NODES, dtype, (2, 2))
    g.edata["w"] = torch.arange(EDGES, dtype=torch.float64)
    g.edata["a/b"] = torch.randn(EDGES, 2).half()
    return g


def hetero() -> Any:
    """Three node types and five relations; two with the same name, two between the same types."""
    torch.manual_seed(1)
    sizes = {"user": 30, "item": 24, "item/tag": 12}
    kinds = [
        ("user", "buys", "item"),
        ("user", "sees", "item"),
        ("item", "has", "item/tag"),
        ("user", "knows", "user"),
        ("item/tag", "has", "user"),
    ]
    ends = {k: tuple(torch.randint(sizes[end], (90,)) for end in (k[0], k[2])) for k in kinds}
    g = dgl.heterograph(ends, num_nodes_dict=sizes)
    for kind in g.ntypes:
        g.nodes[kind].data["feat"] = torch.randn(sizes[kind], 4)
    g.nodes["user"].data["train_mask"] = torch.arange(30) % 3 == 0
    g.nodes["user"].data["mask of 3"] = (torch.arange(30) % 4).byte()
    g.nodes["user"].data["flag"] = torch.arange(30) % 3 == 1
    g.nodes["item"].data["price/in euro"] = torch.arange(24)
    for number, kind in enumerate(g.canonical_etypes):
        g.edges[kind].data["w"] = torch.arange(90) + 1000 * number
    g.edges["user", "knows", "user"].data["train_mask_20"] = torch.arange(90) % 2 == 1
    return g


def make(kind: str) -> Any:
    return homogeneous() if kind == "homogeneous" else hetero()


def sorted_fields(graph: RawGraph) -> RawGraph:
    """The same graph, its fields in the order of their names."""
    nodes = {kind: dict(sorted(fields.items())) for kind, fields in graph.node_fields.items()}
    edges = {kind: dict(sorted(fields.items())) for kind, fields in graph.edge_fields.items()}
    return replace(graph, node_fields=nodes, edge_fields=edges)


@dataclass
class Written:
    """A partition directory: the original graph, the JSON, and DGL's mappings to original ids."""

    g: Any
    path: Path
    node_ids: Any
    edge_ids: Any


def write(folder: Path, g: Any, parts: int = 3, method: str = "random", **options: Any) -> Written:
    dgl.seed(0)
    node_ids, edge_ids = dgl.distributed.partition_graph(
        g, "some name", parts, str(folder), part_method=method, return_mapping=True, **options
    )
    return Written(g, folder / "some name.json", node_ids, edge_ids)


def expected(g: Any) -> RawGraph:
    """What DGL's files hold of a graph: booleans are uint8 there, of which masks come back as booleans."""
    graph = read(g)
    for fields in graph.node_fields.values():
        if "flag" in fields:
            fields["flag"] = fields["flag"].byte()
    return sorted_fields(graph)


def assert_new_ids(written: Written, graph: RawGraph) -> None:
    """Every node, edge and field of the original graph, where DGL's mappings say it is."""
    whole, single = expected(written.g), written.g.is_homogeneous
    for kind in whole.num_nodes:
        ids = written.node_ids if single else written.node_ids[kind]
        assert graph.node_fields[kind].keys() == whole.node_fields[kind].keys()
        for name, field in whole.node_fields[kind].items():
            assert graph.node_fields[kind][name].dtype == field.dtype
            assert torch.equal(graph.node_fields[kind][name], field[ids])
    for kind, arrays in whole.edges.items():
        edge_ids = written.edge_ids if single else written.edge_ids[kind]
        ends = [(written.node_ids if single else written.node_ids[end]) for end in (kind[0], kind[2])]
        assert torch.equal(ends[0][graph.edges[kind].src], arrays.src[edge_ids])
        assert torch.equal(ends[1][graph.edges[kind].dst], arrays.dst[edge_ids])
        assert graph.edge_fields[kind].keys() == whole.edge_fields[kind].keys()
        for name, field in whole.edge_fields[kind].items():
            assert graph.edge_fields[kind][name].dtype == field.dtype
            assert torch.equal(graph.edge_fields[kind][name], field[edge_ids])


def assert_division(written: Written, graph: RawGraph) -> None:
    """The parts that DGL's own loader tells."""
    book = dgl.distributed.load_partition_book(str(written.path), 0)[0]
    assert graph.division is not None and graph.division.parts == book.num_partitions()
    for kind in written.g.ntypes:
        part_of = graph.division.part_of[NODE if list(graph.num_nodes) == [NODE] else kind]
        assert torch.equal(part_of.long(), book.nid2partid(torch.arange(written.g.num_nodes(kind)), kind))


def change_graph(folder: Path, part: int, change: Any) -> None:
    path = str(folder / f"part{part}" / "graph.dgl")
    graph = dgl.load_graphs(path)[0][0]
    change(graph)
    dgl.save_graphs(path, [graph])
