"""What is written is what is read: the original graph comes back from any number of parts and ranks."""

import os
import tempfile
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from store_helpers import (
    ALL_DTYPES,
    assert_same,
    assert_sorted,
    awkward,
    bipartite,
    homogeneous,
    rebuilt,
    shared_data,
    values,
)

import shardpass as sp
from shardpass.data import (
    EDGE,
    NODE,
    EdgeArrays,
    RawGraph,
    merge_parts,
    merged_edges,
    open_store,
    partition,
    parts_of_rank,
    rows,
    tensor_file,
    verify,
)
from shardpass.errors import StoreError
from shardpass.testing import run
from tests.forged import reseal


def check(graph: RawGraph, path: Path, parts: int, **arguments) -> None:
    manifest = partition(graph, path, parts, **arguments)
    store = open_store(path)
    assert store.manifest == manifest
    assert_sorted(store)
    for ranks in {1, min(2, parts), parts}:
        assert_same(rebuilt(store, ranks), graph)
    verify(path)


@pytest.mark.parametrize("method", ["metis", "random", "range"])
@pytest.mark.parametrize("parts", [1, 2, 3, 11])
@pytest.mark.parametrize("make", [awkward, bipartite])
def test_every_partitioner(tmp_path, make, parts, method):
    if method == "metis":
        pytest.importorskip("pymetis")
    check(make(), tmp_path / "store", parts, method=method)


def test_given_assignment_with_empty_parts(tmp_path):
    graph = awkward()
    assignment = [3, 3, 1, 1, 3, 1, 3, 3]
    check(graph, tmp_path / "store", 5, assignment=assignment)
    manifest = open_store(tmp_path / "store").manifest
    assert manifest.offsets[NODE] == [0, 0, 3, 3, 8, 8]
    assert manifest.method == "given"
    src, dst = graph.edges[EDGE].src, graph.edges[EDGE].dst
    parts = torch.tensor(assignment)
    assert manifest.cut_edges[EDGE] == int((parts[src] != parts[dst]).sum())


@pytest.mark.parametrize("num_nodes", [0, 1, 5])
def test_no_edges(tmp_path, num_nodes):
    pytest.importorskip("pymetis")
    check(homogeneous(num_nodes, [], []), tmp_path / "store", 3)


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_dtypes_survive(tmp_path, dtype):
    graph = RawGraph(
        {NODE: 4},
        {EDGE: EdgeArrays([0, 1, 2], [1, 2, 3])},
        {NODE: {"scalar": values(4, dtype), "wide": values(4, dtype, (2, 3)), "none": values(4, dtype, (0,))}},
        {EDGE: {"scalar": values(3, dtype, seed=5)}},
    )
    check(graph, tmp_path / "store", 2, method="random")
    data = merge_parts(open_store(tmp_path / "store"), 1, 0)
    assert data.node_fields[NODE]["scalar"].dtype == dtype
    assert data.node_fields[NODE].info["wide"].shape == (2, 3)


def with_links() -> RawGraph:
    pairs, kind = torch.tensor([[0, 4, 1, 1, 3], [2, 0, 0, 1, 2]]), ("user/first,__type", "buys", "item")
    links = {kind: {"edge_label_index": pairs, "edge_label": torch.tensor([1.0, 0, 1, 0, 1])}}
    return replace(bipartite(), links=links, graph_fields={"y/1": values(7, torch.float64, (2,)), "title": "shop"})


def test_links_and_arrays_of_the_graph(tmp_path):
    graph, path = with_links(), tmp_path / "store"
    manifest = partition(graph, path, 3, method="random")
    assert open_store(path).manifest == manifest and verify(path) == manifest
    ((kind, links),) = graph.links.items()

    def work(comm):
        found = sp.load(path, comm)
        src, dst = found[kind].edge_label_index
        assert found.title == "shop" and torch.equal(found.graph_fields["y/1"], graph.graph_fields["y/1"])
        return torch.stack([src.plain, dst.plain]), found[kind].edge_label

    for ranks in (1, 2, 3):
        for rank, (pairs, labels) in enumerate(run(work, ranks)):
            assert torch.equal(pairs, links["edge_label_index"][:, rank::ranks])
            assert torch.equal(labels, links["edge_label"][rank::ranks])
    partition(graph, path, 2, method="random", overwrite=True)
    file = path / "graph.safetensors"
    file.write_bytes(file.read_bytes().replace(links["edge_label"].numpy().tobytes(), bytes(20)))
    for use in (verify, lambda path: run(lambda comm: sp.load(path, comm), 2)):
        with pytest.raises(StoreError, match=r"graph\.safetensors is altered: the checksum of the tensor 'link/"):
            use(path)
    reseal(path)
    verify(path)
    file.write_bytes(file.read_bytes().replace(links["edge_label_index"].numpy().tobytes(), bytes([99]) + bytes(79)))
    reseal(path)
    with pytest.raises(StoreError, match=r"'edge_label_index' of .* does not fit pairs of nodes"):
        verify(path)
    file.unlink()
    with pytest.raises(StoreError, match=r"graph\.safetensors cannot be read"):
        open_store(path)


@st.composite
def graphs(draw) -> tuple[RawGraph, int, dict]:
    types = draw(
        st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=4), min_size=1, max_size=3, unique=True)
    )
    num_nodes = {kind: draw(st.integers(0, 9)) for kind in types}
    parts = draw(st.integers(1, 5))
    edges, edge_fields, node_fields = {}, {}, {}
    dtypes = st.sampled_from(ALL_DTYPES)
    for number in range(draw(st.integers(0, 3))):
        kind = (
            draw(st.sampled_from(types)),
            draw(st.sampled_from(["to", "a,b", "x/y", "é"])) + str(number),
            draw(st.sampled_from(types)),
        )
        count = draw(st.integers(0, 20)) if num_nodes[kind[0]] and num_nodes[kind[2]] else 0
        ends = [
            [draw(st.integers(0, num_nodes[kind[end]] - 1)) for _ in range(count)] if count else [] for end in (0, 2)
        ]
        edges[kind] = EdgeArrays(*(torch.tensor(end, dtype=torch.int64) for end in ends))
        edge_fields[kind] = {"attr/1": values(count, draw(dtypes), (draw(st.integers(0, 2)),))}
    for kind, count in num_nodes.items():
        node_fields[kind] = {name: values(count, draw(dtypes)) for name in draw(st.sets(st.sampled_from("xyz%/")))}
    assignment = {
        kind: torch.tensor([draw(st.integers(0, parts - 1)) for _ in range(count)], dtype=torch.int64)
        for kind, count in num_nodes.items()
    }
    return RawGraph(num_nodes, edges, node_fields, edge_fields), parts, assignment


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(graphs())
def test_any_graph_any_partition(drawn):
    graph, parts, assignment = drawn
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "store"
        partition(graph, path, parts, assignment=assignment)
        store = open_store(path)
        assert_sorted(store)
        for ranks in range(1, parts + 1):
            assert_same(rebuilt(store, ranks), graph)


def test_files_are_what_the_safetensors_library_reads(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    partition(awkward(), tmp_path / "store", 2, method="random")
    store = open_store(tmp_path / "store")
    for file in store.files:
        read = safetensors.load_file(file.path)
        assert set(read) == set(file.record.tensors)
        for key, tensor in read.items():
            assert torch.equal(tensor, file.tensor(key))
            assert tensor.dtype == file.tensor(key).dtype


def test_single_part_is_mapped_and_private(tmp_path):
    partition(awkward(), tmp_path / "store", 1, method="range")
    store = open_store(tmp_path / "store")
    x = merge_parts(store, 1, 0).node_fields[NODE]["x"]
    address = store.files[0].tensor("node/node/x").data_ptr()
    assert x.data_ptr() == address
    x += 1
    verify(tmp_path / "store")


def test_edges_of_as_many_ranks_as_parts_are_mapped(tmp_path):
    partition(awkward(), tmp_path / "store", 2, method="range")
    store = open_store(tmp_path / "store")
    for rank, file in enumerate(store.files):
        stored = file.tensor("edge/node,to,node/src_rows")
        owners = merge_parts(store, 2, rank).edges[EDGE].owners
        assert all(
            edges.src_rows.untyped_storage().data_ptr() == stored.untyped_storage().data_ptr() for edges in owners
        )


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_parts_are_merged_some_destinations_at_a_time(tmp_path, monkeypatch, ranks):
    monkeypatch.setattr(merged_edges, "_EDGES_AT_ONCE", 3)
    monkeypatch.setattr(tensor_file, "_BLOCK_BYTES", 8)
    for number, graph in enumerate((awkward(), bipartite())):
        partition(graph, tmp_path / str(number), 5, method="random", seed=1)
        assert_same(rebuilt(open_store(tmp_path / str(number)), ranks), graph)


def test_features_are_copied_in_blocks(tmp_path, monkeypatch):
    num_nodes, width = 4000, 2000  # 32 MB
    fields = {NODE: {"x": torch.zeros(num_nodes, width)}}
    graph = RawGraph({NODE: num_nodes}, {EDGE: EdgeArrays([0], [1])}, fields)
    sizes = []
    take_rows = rows.take_rows
    monkeypatch.setattr(
        rows, "take_rows", lambda field, ids: sizes.append(ids.numel() * width * 4) or take_rows(field, ids)
    )
    partition(graph, tmp_path / "store", 1, method="range")
    assert sum(sizes) == num_nodes * width * 4
    assert max(sizes) <= rows.BLOCK_BYTES


def test_fields_are_verified_on_first_use_and_kept(tmp_path):
    partition(awkward(), tmp_path / "store", 2, method="range")
    data = merge_parts(open_store(tmp_path / "store"), 1, 0)
    fields = data.node_fields[NODE]
    assert sorted(fields) == ["train_mask", "x", "y"]
    assert "x" in fields and "z" not in fields
    assert fields["x"] is fields["x"]
    with pytest.raises(KeyError, match=r"there is no field 'z'; the store holds \['train_mask', 'x', 'y'\]"):
        fields["z"]


def test_overwrite_replaces_only_stores(tmp_path):
    path = tmp_path / "store"
    partition(awkward(), path, 3, method="range")
    with pytest.raises(StoreError, match=r"already holds a store; pass overwrite=True.*once, before training"):
        partition(awkward(), path, 2, method="range")
    assert partition(awkward(), path, 2, method="range", overwrite=True).num_parts == 2
    assert open_store(path).num_parts == 2
    assert sorted(os.listdir(path)) == ["manifest.json", "part-00000.safetensors", "part-00001.safetensors"]
    (path / "notes.txt").write_text("mine")
    with pytest.raises(StoreError, match=r"holds other files \(notes.txt\) and will not be replaced"):
        partition(awkward(), path, 2, method="range", overwrite=True)
    assert os.listdir(tmp_path) == ["store"]


def test_a_store_that_was_replaced_is_not_read(tmp_path):
    graph = homogeneous(9, torch.arange(9), torch.arange(9).roll(4))
    partition(graph, tmp_path / "store", 4, "random")
    old = sp.load(tmp_path / "store", sp.connect("local"))
    partition(graph, tmp_path / "store", 4, "random", seed=1, overwrite=True)
    with pytest.raises(StoreError, match="was replaced after the store was opened: load the store again"):
        _ = old.edge_ids


def test_failure_leaves_nothing(tmp_path):
    path = tmp_path / "store"

    def fail(stage, done, total):
        if (stage, done) == ("write", 1):
            assert not path.exists()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        partition(awkward(), path, 2, method="range", progress=fail)
    assert os.listdir(tmp_path) == []
    partition(awkward(), path, 1, method="range")
    with pytest.raises(KeyboardInterrupt):
        partition(awkward(), path, 2, method="range", overwrite=True, progress=fail_at_write)
    assert open_store(path).num_parts == 1
    assert os.listdir(tmp_path) == ["store"]


def fail_at_write(stage, done, total):
    if stage == "write":
        raise KeyboardInterrupt


def test_fingerprints(tmp_path):
    graph = awkward()
    first = partition(graph, tmp_path / "a", 2, method="random", seed=1)
    again = partition(graph, tmp_path / "b", 2, method="random", seed=1)
    other = partition(graph, tmp_path / "c", 3, method="random", seed=2)
    changed = partition(homogeneous(8, [0], [1]), tmp_path / "d", 2, method="random", seed=1)
    assert first == again
    assert first.graph_fingerprint == other.graph_fingerprint != changed.graph_fingerprint
    assert first.partition_fingerprint != other.partition_fingerprint
    relabelled = RawGraph(graph.num_nodes, graph.edges, {NODE: {"y": torch.arange(8)}})
    fields = partition(relabelled, tmp_path / "e", 2, method="random", seed=1)
    assert fields.partition_fingerprint == first.partition_fingerprint
    assert again.contents_fingerprint == first.contents_fingerprint != fields.contents_fingerprint


def test_progress_and_missing_parent(tmp_path):
    calls = []
    partition(awkward(), tmp_path / "store", 2, method="range", progress=lambda *call: calls.append(call))
    assert calls[:4] == [("read", 0, 1), ("read", 1, 1), ("assign", 0, 1), ("assign", 1, 1)]
    assert calls[4:] == [("sort", 0, 12), ("sort", 12, 12), ("write", 0, 2), ("write", 1, 2), ("write", 2, 2)]
    partition(awkward(), tmp_path / "new" / "folder" / "store", 2, method="range")
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"cannot write .*store: .*file cannot be made"):
        partition(awkward(), tmp_path / "file" / "store", 2)


@pytest.mark.parametrize(("num_parts", "ranks"), [(1, 1), (7, 3), (8, 4), (5, 5), (32, 3)])
def test_parts_of_rank(num_parts, ranks):
    runs = [parts_of_rank(num_parts, ranks, rank) for rank in range(ranks)]
    assert [part for run in runs for part in run] == list(range(num_parts))
    assert max(map(len, runs)) - min(map(len, runs)) <= 1


def test_one_rank_of_several_parts_warns_of_the_order(tmp_path):
    """Labels of the original graph are as many as rows then, so that nothing else would tell."""
    comm = sp.connect()
    graph = awkward()
    for name, parts, how in [("one", 1, None), ("more", 2, [0, 1] * 4), ("range", 2, [0] * 4 + [1] * 4)]:
        partition(graph, tmp_path / name, parts, **({} if how is None else {"assignment": how}))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = sp.load(tmp_path / name, comm)
        in_order = bool((found.node_ids == torch.arange(8)).all())
        assert in_order == (name != "more")
        assert [str(one.message) for one in caught if "not in the original order" in str(one.message)] == (
            [] if in_order else [str(caught[0].message)]
        )
        assert in_order or caught[0].filename == __file__


def test_wrong_ranks_and_parts(tmp_path):
    with pytest.raises(ValueError, match="4 ranks, but the store has 2 parts and every rank needs one: run at most 2"):
        parts_of_rank(2, 4, 0)
    with pytest.raises(ValueError, match=r"rank 2 of 2: expected a rank in \[0, 2\)"):
        parts_of_rank(2, 2, 2)
    partition(awkward(), tmp_path / "store", 2, method="range")
    store = open_store(tmp_path / "store")
    for ranks, rank, words in ((3, 0, "3 ranks, but the store has 2 parts"), (2, 2, "rank 2 of 2")):
        with pytest.raises(ValueError, match=words):
            merge_parts(store, ranks, rank)


@pytest.mark.skipif(shared_data("cora") is None, reason="the real graphs are not beside this checkout")
def test_cora(tmp_path):
    pytest.importorskip("pymetis")
    from shardpass.data import read

    graph = read(shared_data("cora"))
    check(graph, tmp_path / "store", 4)
    manifest = open_store(tmp_path / "store").manifest
    assert manifest.num_nodes == {NODE: 2708} and manifest.num_edges == {EDGE: 10556}
    assert manifest.cut_edges[EDGE] < 1500
