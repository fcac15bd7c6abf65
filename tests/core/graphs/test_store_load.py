"""From a graph to a store to every rank's share, and back: nothing lost, nothing altered, failures told to all."""

import shutil

import pytest
import torch

pytest.importorskip("safetensors")

import shardpass as sp
from shardpass.core.exchange import halo_fetch
from shardpass.errors import DivergenceError, PeerFailure, StoreError
from shardpass.testing import run

PARTS = 4
NUM_NODES = 23


def raw_graph():
    """Directed, with self-loops, duplicates and isolated nodes, and no two rows of a field alike."""
    generator = torch.Generator().manual_seed(0)
    edge_index = torch.randint(0, NUM_NODES - 3, (2, 90), generator=generator)
    edge_index[:, :4] = torch.arange(4)
    edge_index[:, 4:7] = edge_index[:, 7:10]
    edges, nodes = torch.arange(90), torch.arange(NUM_NODES)
    return {
        "edge_index": edge_index,
        "x": torch.stack([nodes, nodes * 2], 1).float() / 3,
        "y": nodes % 6,
        "train_mask": nodes % 3 == 0,
        "edge_attr": torch.stack([edges, -edges], 1).double() / 7,
        "edge_weight": (edges * 0.25).bfloat16(),
    }


RAW = raw_graph()


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """Stores by name: random parts, one part empty, one part alone has all in-edges."""
    where = tmp_path_factory.mktemp("stores")
    empty = torch.arange(NUM_NODES) % 3
    sinks = (torch.bincount(RAW["edge_index"][1], minlength=NUM_NODES) > 0).long() * 3
    sp.partition(RAW, where / "random", PARTS, "random")
    sp.partition(RAW, where / "empty", PARTS, assignment=torch.where(empty == 2, 3, empty))
    sp.partition(RAW, where / "no edges", PARTS, assignment=sinks)
    return where


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("name", ["random", "empty", "no edges"])
def test_everything_comes_back(stores, name, ranks):
    def work(comm):
        graph = sp.load(stores / name, comm)
        ids = halo_fetch(graph.node_ids, graph.relation.plan, "ids")
        row, col = graph.edge_index.plain
        return graph, torch.stack([ids[row], graph.node_ids[col]]), sp.gather(graph, graph.x), sp.gather(graph, graph.y)

    results = run(work, ranks)
    node_ids = torch.cat([r[0].node_ids for r in results])
    edge_ids = torch.cat([r[0].edge_ids for r in results])
    assert torch.equal(node_ids.sort()[0], torch.arange(NUM_NODES))
    assert torch.equal(edge_ids.sort()[0], torch.arange(90))
    for rank, (graph, edge_index, x, y) in enumerate(results):
        assert torch.equal(edge_index, RAW["edge_index"][:, graph.edge_ids])
        for field in ("x", "y", "train_mask"):
            assert torch.equal(getattr(graph, field), RAW[field][graph.node_ids])
            assert getattr(graph, field).dtype == RAW[field].dtype
        for field in ("edge_attr", "edge_weight"):
            assert torch.equal(getattr(graph, field), RAW[field][graph.edge_ids])
            assert getattr(graph, field).dtype == RAW[field].dtype
        assert (graph.total_nodes, graph.total_edges) == (NUM_NODES, 90)
        assert (graph.num_own_nodes, graph.num_own_edges) == (len(graph.node_ids), len(graph.edge_ids))
        assert (graph.num_features, graph.num_classes) == (2, 6)
        assert graph.batch.shape == (graph.num_own_nodes,) and set(graph.node) == {"x", "y", "train_mask"}
        assert set(graph.edge) == {"edge_attr", "edge_weight"} and graph.comm.rank == rank
        assert graph.num_halo == graph.relation.plan.num_halo
        if rank:
            assert x is None and y is None
        else:
            assert torch.equal(x, RAW["x"]) and torch.equal(y, RAW["y"])


def everywhere(work, ranks):
    """What each rank raised."""

    def caught(comm):
        try:
            work(comm)
        except Exception as error:
            return error

    return run(caught, ranks)


@pytest.mark.parametrize("options", [{"mode": "halo"}, {"block_rows": 3}, {"prefetch": 2}, {"chunk_bytes": 9}], ids=str)
def test_options_that_differ(stores, options):
    errors = everywhere(
        lambda comm: sp.load(stores / "random", comm, sp.Options(**(options if comm.rank == 1 else {}))), 3
    )
    for error in errors:
        assert isinstance(error, DivergenceError)
        assert "every rank must load the same options" in str(error) and str(next(iter(options))) in str(error)


def test_options_that_are_no_json(stores):
    everywhere_loaded = everywhere(
        lambda comm: sp.load(stores / "random", comm, sp.Options(wire_dtype=torch.bfloat16)), 2
    )
    assert everywhere_loaded == [None, None]


@pytest.mark.parametrize("harm", ["missing", "altered", "short"])
def test_a_part_that_is_wrong_on_one_rank_ends_all(stores, tmp_path, harm):
    """As on machines with disks of their own: the other ranks' copies are whole."""
    harmed = tmp_path / "copy"
    shutil.copytree(stores / "random", harmed)
    part = sorted(p for p in harmed.iterdir() if "manifest" not in p.name)[-1]
    if harm == "missing":
        part.unlink()
    elif harm == "short":
        part.write_bytes(part.read_bytes()[:-8])
    else:
        text = bytearray(part.read_bytes())
        text[len(text) // 2 : len(text) // 2 + 400] = bytes(
            b ^ 255 for b in text[len(text) // 2 : len(text) // 2 + 400]
        )
        part.write_bytes(bytes(text))

    def work(comm):
        graph = sp.load(harmed if comm.rank == 2 else stores / "random", comm)
        [graph.node[name] for name in graph.node]
        [graph.edge[name] for name in graph.edge]
        comm.barrier()

    errors = everywhere(work, 3)
    assert isinstance(errors[2], StoreError) and part.name in str(errors[2])
    if isinstance(errors[0], PeerFailure):
        for error in errors[:2]:
            assert isinstance(error, PeerFailure) and "rank 2 could not load its parts" in str(error)
            assert part.name in str(error)
    else:  # a feature block, verified when first used: the others notice in their next call
        assert harm == "altered" and all(e is not None for e in errors)


def test_gather_tells_wrong_rows(stores):
    def work(comm):
        graph = sp.load(stores / "random", comm)
        sp.gather(graph, torch.rand(graph.num_own_nodes - (comm.rank == 1), 3))

    with pytest.raises(ValueError, match=r"rank 1: gather takes one row per own node, expected .* rows, got"):
        run(work, 2)
