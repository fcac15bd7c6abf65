"""A graph of several types from a store: every field of every type comes back, and what is missing is told."""

import pytest
import torch

pytest.importorskip("safetensors")

import shardpass as sp
from shardpass.core.exchange import halo_fetch
from shardpass.core.graphs import ShardedHeteroGraph
from shardpass.errors import RefusedError
from shardpass.testing import run

WRITES, CITES, IN = ("author", "writes", "paper"), ("paper", "cites", "paper"), ("paper", "in", "venue")
COUNTS = {"paper": 11, "author": 5, "venue": 1, "editor": 0}


def raw_graph():
    """Numbers that tell their row; a type of one node, one without nodes, an edge type without edges."""

    def ends(src, dst, count):
        return torch.stack([torch.arange(count) * 7 % COUNTS[src], torch.arange(count) * 5 % COUNTS[dst]])

    rows = {kind: torch.arange(count) for kind, count in COUNTS.items()}
    nodes = {
        "paper": {
            "x": rows["paper"].double().view(-1, 1) * 10,
            "y": rows["paper"] % 4,
            "train_mask": rows["paper"] < 3,
        },
        "author": {"x": rows["author"].double().view(-1, 1).repeat(1, 2), "name": rows["author"] + 100},
        "venue": {"num_nodes": 1},
        "editor": {"num_nodes": 0},
    }
    edges = {
        WRITES: {"edge_index": ends("author", "paper", 13), "edge_attr": torch.arange(13.0).view(-1, 1)},
        CITES: {"edge_index": ends("paper", "paper", 20), "edge_weight": torch.arange(20.0)},
        IN: {"edge_index": ends("paper", "venue", 4)},
        ("paper", "about", "author"): {"edge_index": torch.empty(2, 0, dtype=torch.long)},
    }
    return {**nodes, **edges}


RAW = raw_graph()


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    path = tmp_path_factory.mktemp("store") / "parts"
    sp.partition(RAW, path, 4, "random")
    return path


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_everything_comes_back(store, ranks):
    def work(comm):
        graph = sp.load(store, comm)
        assert isinstance(graph, ShardedHeteroGraph) and not graph.is_homogeneous
        assert graph.metadata() == (list(COUNTS), [WRITES, CITES, IN, ("paper", "about", "author")])
        found = {}
        for kind, edge_index in graph.edge_index_dict.items():
            src, dst = edge_index.plain
            ids = halo_fetch(graph[kind[0]].node_ids, graph.relations[kind].plan, "ids")
            pairs = torch.stack([ids[src], graph[kind[2]].node_ids[dst]])
            assert torch.equal(pairs, RAW[kind]["edge_index"][:, graph[kind].edge_ids])
            found[kind] = graph[kind].num_own_edges
        assert sum(found.values()) == graph.num_own_edges
        assert torch.equal(graph[WRITES].edge_attr, RAW[WRITES]["edge_attr"][graph[WRITES].edge_ids])
        assert torch.equal(graph.edge_weight_dict[CITES], RAW[CITES]["edge_weight"][graph["cites"].edge_ids])
        for kind, x in graph.x_dict.items():
            assert torch.equal(x, RAW[kind]["x"][graph.node_ids_dict[kind]])
        assert torch.equal(graph["author"].name, graph["author"].node_ids + 100)
        return graph, {kind: sp.gather(graph, graph[kind].x, kind) for kind in ("paper", "author")}

    results = run(work, ranks)
    for graph, _ in results:
        for name in ("num_nodes", "num_edges", "num_nodes_dict", "num_edges_dict"):
            for holder in (graph, graph["paper"], graph[WRITES]):
                with pytest.raises(RefusedError, match=rf"`{name}`.*num_own_.*total_"):
                    getattr(holder, name)
        assert list(graph.x_dict) == ["paper", "author"] and list(graph.train_mask_dict) == ["paper"]
        assert list(graph.edge_attr_dict) == [WRITES] and list(graph.edge_weight_dict) == [CITES]
        assert graph.num_features == {"paper": 1, "author": 2, "venue": 0, "editor": 0}
        assert graph["paper"].num_classes == 4 and graph["paper"].total_nodes == 11 and graph[IN].total_edges == 4
        assert graph.total_nodes == 17 and graph.total_edges == 37 and graph["editor"].num_own_nodes == 0
        assert "x" in graph["paper"] and "x" not in graph["venue"] and graph["author"].keys() == ["x", "name"]
    for kind in COUNTS:
        assert sum(graph[kind].num_own_nodes for graph, _ in results) == COUNTS[kind]
    assert torch.equal(results[0][1]["paper"], RAW["paper"]["x"])
    assert torch.equal(results[0][1]["author"], RAW["author"]["x"])
    assert all(gathered["paper"] is None for _, gathered in results[1:])


@pytest.fixture(scope="module")
def graph(store):
    return sp.load(store, sp.connect("local"))


def test_edge_types_may_be_named_as_in_pyg(graph):
    assert graph["author", "writes", "paper"] is graph["author", "paper"] is graph["writes"]
    assert repr(graph["writes"]) == f"OwnEdges({WRITES}: 13 of 13, fields ['edge_attr'])"
    assert repr(graph["venue"]) == "OwnNodes('venue': 1 of 1, fields [])"
    assert repr(graph) == (
        "ShardedHeteroGraph(rank 0 of 1: 11 of 11 paper, 5 of 5 author, 1 of 1 venue, 0 of 0 editor; "
        "37 of 37 edges of 4 types, mode='sar')"
    )


@pytest.mark.parametrize(
    ("use", "error", "words"),
    [
        (lambda g: g["papr"], KeyError, "'papr' is not a type of this graph; nodes: \\['paper'"),
        (lambda g: g["author", "cites", "paper"], KeyError, "is not a type of this graph"),
        (
            lambda g: g["paper"].pos,
            AttributeError,
            "nodes of type 'paper' have no field 'pos'; there are: train_mask, x, y",
        ),
        (lambda g: g["venue"]["x"], KeyError, "no field 'x' is stored"),
        (lambda g: g[IN].edge_attr, AttributeError, "have no field 'edge_attr'; there are: none"),
        (lambda g: g["author"].num_classes, ValueError, "nodes of type 'author' have no labels"),
        (lambda g: g.x, AttributeError, r"a field belongs to a type, as in graph\[type\].x or graph.x_dict"),
        (lambda g: g.pos_dict, AttributeError, "no type of this graph has a field 'pos'"),
        (lambda g: g.edge_index, ValueError, r"`relation` is for graphs of one node .* graph\[type\]"),
        (lambda g: sp.gather(g, g["paper"].x), ValueError, r"node_type=None; expected one of the types .*'paper'"),
        (lambda g: sp.gather(g, g["paper"].x, "author"), ValueError, "expected 5 rows, got 11"),
    ],
)
def test_what_is_not_there_is_told(graph, use, error, words):
    with pytest.raises(error, match=words):
        use(graph)
