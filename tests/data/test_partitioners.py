"""Partitioners: every node gets a part, sizes are balanced, wrong arguments are refused in words."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from store_helpers import awkward, bipartite, homogeneous

from shardpass.data import EDGE, NODE, partition
from shardpass.data.partitioners import METHODS, assign
from shardpass.data.streaming.adjacency import EDGE_BYTES, NODE_BYTES
from shardpass.errors import ShardpassError


def grid(side: int):
    """An undirected square grid, its nodes in random order."""
    ids = torch.randperm(side * side, generator=torch.Generator().manual_seed(0)).view(side, side)
    pairs = torch.cat(
        [torch.stack([ids[1:], ids[:-1]]).flatten(1), torch.stack([ids[:, 1:], ids[:, :-1]]).flatten(1)], 1
    )
    both = torch.cat([pairs, pairs.flip(0)], 1)
    return homogeneous(side * side, both[0].tolist(), both[1].tolist()).validate()


@pytest.mark.parametrize("method", sorted(METHODS))
@pytest.mark.parametrize("parts", [1, 2, 3, 8, 40])
@pytest.mark.parametrize("make", [awkward, bipartite])
def test_every_node_has_a_part(make, parts, method):
    if method in ("kaminpar", "metis"):
        pytest.importorskip({"metis": "pymetis"}.get(method, method))
    graph = make().validate()
    assigned = assign(graph, parts, method)
    for kind, count in graph.num_nodes.items():
        assert assigned[kind].shape == (count,) and assigned[kind].dtype == torch.int32
        assert count == 0 or (int(assigned[kind].min()) >= 0 and int(assigned[kind].max()) < parts)
    if method != "kaminpar":  # which does not promise it
        again = assign(graph, parts, method)
        assert all(torch.equal(assigned[kind], again[kind]) for kind in assigned)


@pytest.mark.parametrize("parts", [1, 3, 7])
@pytest.mark.parametrize("method", ["random", "range"])
def test_balanced_sizes(parts, method):
    for graph in (awkward().validate(), bipartite().validate()):
        assigned = assign(graph, parts, method, seed=4)
        for part_of in assigned.values():
            sizes = torch.bincount(part_of, minlength=parts)
            assert int(sizes.max() - sizes.min()) <= 1
    total = torch.bincount(torch.cat(list(assign(bipartite(), parts, "random").values())), minlength=parts)
    assert int(total.max() - total.min()) <= 1
    assert (assign(awkward(), parts, "range")[NODE].diff() >= 0).all()


@pytest.mark.parametrize("method", ["kaminpar", "metis"])
@pytest.mark.parametrize("parts", [2, 4, 12])
def test_cuts_little_and_balances(parts, method):
    pytest.importorskip({"metis": "pymetis"}.get(method, method))
    graph = grid(24)
    part_of = assign(graph, parts, method)[NODE]
    src, dst = graph.edges[EDGE].src, graph.edges[EDGE].dst
    cut = int((part_of[src] != part_of[dst]).sum())
    assert cut < 0.35 * len(src)
    for sizes in (torch.bincount(part_of, minlength=parts), torch.bincount(part_of[dst], minlength=parts)):
        assert float(sizes.max() / sizes.float().mean()) < 1.15


def power_law(features):
    """Some nodes have many in-edges; the features have so many columns."""
    generator = torch.Generator().manual_seed(0)
    src, dst = (torch.rand(2, 12_000, generator=generator) ** torch.tensor([[1.0], [3.0]]) * 1500).long()
    graph = homogeneous(1500, src, dst)
    return replace(graph, node_fields={NODE: {"x": torch.zeros(1500, features)}}).validate()


def heaviest(weights, part_of, parts):
    """The heaviest part over the mean."""
    sums = torch.zeros(parts, dtype=torch.float64).index_add_(0, part_of.long(), weights.double())
    return float(sums.max() / sums.mean())


@pytest.mark.parametrize("method", ["kaminpar", "metis"])
@pytest.mark.parametrize("features", [2, 64])
def test_the_bytes_of_ranks_are_balanced(method, features):
    pytest.importorskip({"metis": "pymetis"}.get(method, method))
    graph = power_law(features)
    in_degrees = torch.bincount(graph.edges[EDGE].dst, minlength=1500)
    num_bytes = in_degrees * EDGE_BYTES + NODE_BYTES + features * 4
    assert heaviest(num_bytes, assign(graph, 4, method)[NODE], 4) <= 1.05
    weights = torch.rand(1500, generator=torch.Generator().manual_seed(1)) ** 4 * 1e9 + 1
    for given in (weights, weights / weights.sum()):  # in any unit
        assert heaviest(weights, assign(graph, 4, method, node_weights=given)[NODE], 4) <= 1.05


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"node_weights": torch.ones(3)}, r"have the shape \[3\]; expected \[1500\], one number per node"),
        ({"node_weights": torch.arange(1500)}, "node 0 of type 'node' weighs 0.0; expected a number above 0"),
        ({"node_weights": torch.full((1500,), torch.nan)}, "weighs nan; expected a number above 0"),
        ({"node_weights": {"paper": [1]}}, r"the array of node weights has the node types \['paper'\]"),
        (
            {"node_weights": torch.ones(1500), "method": "range"},
            "for the methods 'kaminpar' and 'metis'.* not for 'range'",
        ),
    ],
)
def test_weights_that_make_no_sense_are_refused(options, problem):
    with pytest.raises(ValueError, match=problem):
        assign(power_law(2), 4, **options)


@pytest.mark.parametrize("method", ["kaminpar", "metis"])
def test_without_edges_and_with_isolated_nodes(method):
    pytest.importorskip({"metis": "pymetis"}.get(method, method))
    for graph in (homogeneous(9, [], []), homogeneous(9, [0, 0, 1], [0, 1, 0]), homogeneous(1, [0], [0])):
        for parts in (1, 2, 4):
            assert assign(graph.validate(), parts, method)[NODE].numel() == graph.num_nodes[NODE]


@pytest.mark.parametrize(
    "values", [[1, 0, 1, 0, 1, 0, 1, 0], np.arange(8) % 2, torch.tensor([0, 1] * 4, dtype=torch.uint8)]
)
def test_given(values):
    assert assign(awkward(), 2, assignment=values)[NODE].tolist() == list(map(int, values))


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ([0] * 7, ValueError, r"have the shape \[7\]; expected \[8\], one part per node"),
        (
            [0, 0, 0, 5, 0, 0, 0, -1],
            ValueError,
            r"nodes of type 'node': 5 at position 3 is outside the valid interval \[0, 2\); .* number of parts",
        ),
        ([0.0] * 8, TypeError, "are torch.float64; expected integers: convert them to int64"),
        ([True] * 8, TypeError, "are torch.bool; expected integers"),
        ({"nodes": [0] * 8}, ValueError, r"has the node types \['nodes'\]; the graph has \['node'\]"),
        (["a"] * 8, TypeError, "which tensors cannot hold"),
    ],
)
def test_wrong_assignments(values, error, message):
    with pytest.raises(error, match=message):
        assign(awkward(), 2, assignment=values)


def test_a_failure_of_kaminpar_is_one_sentence_and_leaves_nothing(tmp_path, monkeypatch):
    pytest.importorskip("kaminpar")
    monkeypatch.setattr("sys.executable", shutil.which("false"))  # as a process that is killed says nothing
    with pytest.raises(ShardpassError, match=r"KaMinPar failed with exit code 1 \(it printed nothing; .* use method="):
        partition(grid(4), tmp_path / "store", 2)
    assert not list(tmp_path.iterdir())


def test_the_manifest_is_printed_as_a_summary(tmp_path):
    manifest = partition(bipartite(), tmp_path / "store", 2, "range")
    first, second = str(manifest).splitlines()
    nodes, edges = sum(manifest.num_nodes.values()), sum(manifest.num_edges.values())
    cut = sum(manifest.cut_edges.values()) / edges
    assert first == f"{nodes} nodes and {edges} edges in 2 parts, {cut:.1%} of the edges cut (range)"
    own = [sum(offsets[part + 1] - offsets[part] for offsets in manifest.offsets.values()) for part in range(2)]
    into = [sum(counts[part] for counts in manifest.part_edges.values()) for part in range(2)]
    assert second == f"nodes of a part: {min(own)} to {max(own)}; its edges: {min(into)} to {max(into)}"
    assert repr(manifest) == str(manifest), "a notebook shows the representation"
    assert "edges in 1 part, 0.0%" in str(partition(bipartite(), tmp_path / "one", 1, "range"))


def test_wrong_arguments(tmp_path):
    with pytest.raises(ValueError, match="unknown partition method 'metiss'; the methods are kaminpar, metis, "):
        assign(awkward(), 2, "metiss")
    with pytest.raises(ValueError, match="0 parts; expected at least 1"):
        partition(awkward(), tmp_path / "store", 0)
    with pytest.raises(TypeError):
        partition(awkward(), tmp_path / "store", 2.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="0 threads; expected at least 1"):
        partition(awkward(), tmp_path / "store", 2, threads=0)
    with pytest.raises(ValueError, match="one assignment for 2 node types; expected a dict with an array for each"):
        assign(bipartite(), 2, assignment=[0] * 8)


@pytest.mark.parametrize(
    ("method", "package", "other"), [("kaminpar", "kaminpar", "metis"), ("metis", "pymetis", "kaminpar")]
)
def test_missing_package(method, package, other, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, package, None)
    with pytest.raises(
        ImportError, match=rf"needs the package '{package}', .* pip install {package} .*method='{other}'"
    ):
        assign(awkward(), 2, method)
