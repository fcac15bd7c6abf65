"""Graphs for the tests of stores, and what puts a graph together again from a store's parts."""

import json
from pathlib import Path

import torch

from shardpass.core.sharding import OwnerEdges
from shardpass.data import (
    EDGE,
    NODE,
    EdgeArrays,
    RankData,
    RawGraph,
    Store,
    merge_parts,
)

ALL_DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16,
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
]  # fmt: skip


def shared_data(name: str) -> Path | None:
    """The path of a real graph beside the checkout, or None where there is none."""
    path = Path(__file__).parents[3] / "shared" / "data" / f"{name}.npz"
    return path if path.is_file() else None


def values(count: int, dtype: torch.dtype, width: tuple[int, ...] = (), seed: int = 0) -> torch.Tensor:
    """Numbers of a dtype, [count, *width]."""
    whole = torch.randint(0, 120, (count, *width), generator=torch.Generator().manual_seed(seed))
    if dtype is torch.bool:
        return whole % 2 == 0
    if dtype.is_complex:
        return torch.complex(whole.double() / 7, 5 - whole.double()).to(dtype)
    if dtype.is_floating_point:
        return (whole.double() / 7 - 5).to(dtype)
    return whole.to(dtype)


def homogeneous(num_nodes: int, src: list[int], dst: list[int], **edge_fields: torch.Tensor) -> RawGraph:
    """A graph of one type with features, labels and a mask."""
    node_fields = {
        "x": values(num_nodes, torch.float32, (3,)),
        "y": values(num_nodes, torch.int64, seed=1),
        "train_mask": values(num_nodes, torch.bool, seed=2),
    }
    ends = EdgeArrays(torch.as_tensor(src, dtype=torch.int64), torch.as_tensor(dst, dtype=torch.int64))
    return RawGraph({NODE: num_nodes}, {EDGE: ends}, {NODE: node_fields}, {EDGE: edge_fields})


def awkward() -> RawGraph:
    """Directed, with self-loops, duplicate edges, isolated nodes (3 and 7), edge features and weights."""
    src, dst = [0, 1, 1, 2, 2, 0, 0, 4, 5, 6, 6, 1], [1, 0, 2, 2, 0, 1, 1, 6, 6, 6, 4, 5]
    return homogeneous(
        8, src, dst, edge_attr=values(12, torch.float64, (2,)), edge_weight=values(12, torch.bfloat16, seed=3)
    )


def bipartite() -> RawGraph:
    """Users and items: two relations with different edge fields, one without edges, and one within users."""
    user, item = "user/first,__type", "item"
    ids = torch.tensor
    return RawGraph(
        {user: 5, item: 3},
        {
            (user, "buys", item): EdgeArrays(ids([0, 1, 1, 4, 0]), ids([2, 0, 0, 1, 2])),
            (item, "bought by", user): EdgeArrays(ids([2, 0], dtype=torch.int32), ids([0, 1], dtype=torch.int32)),
            (user, "knows", user): EdgeArrays(ids([3, 3, 0]), ids([3, 2, 4])),
            (item, "like", item): EdgeArrays([], []),
        },
        {
            user: {"x": values(5, torch.float16, (2, 2))},
            item: {"x/y": values(3, torch.int16), "x": values(3, torch.bool)},
        },
        {(user, "buys", item): {"price": values(5, torch.float32)}},
        {"classes": 3, "title": "shop", "scale": 0.5},
        "made for tests",
    )


def rebuilt(store: Store, ranks: int) -> RawGraph:
    """The original graph, put together from what each of `ranks` ranks reads."""
    manifest = store.manifest
    groups = [merge_parts(store, ranks, rank) for rank in range(ranks)]
    return _rebuilt(store, groups, manifest.num_nodes, manifest.num_edges)


def _rebuilt(store: Store, groups: list[RankData], num_nodes: dict, num_edges: dict) -> RawGraph:
    node_ids = {kind: torch.cat([group.node_ids[kind] for group in groups]) for kind in num_nodes}
    node_fields = {
        kind: {
            name: _scattered(node_ids[kind], [group.node_fields[kind][name] for group in groups])
            for name in store.manifest.node_fields[kind]
        }
        for kind in num_nodes
    }
    edges, edge_fields = {}, {}
    for kind in num_edges:
        edge_ids = torch.cat([group.edges[kind].edge_ids().long() for group in groups])
        starts = [store.manifest.offsets[kind[0]][group.parts.start] for group in groups]
        ends = [ends_of(group.edges[kind].owners, rank, starts) for rank, group in enumerate(groups)]
        src = [node_ids[kind[0]][src] for src, _ in ends]
        dst = [group.node_ids[kind[2]][dst] for group, (_, dst) in zip(groups, ends)]
        edges[kind] = EdgeArrays(_scattered(edge_ids, src), _scattered(edge_ids, dst))
        edge_fields[kind] = {
            name: _scattered(edge_ids, [group.edge_fields[kind][name] for group in groups])
            for name in store.manifest.edge_fields[kind]
        }
    manifest = store.manifest
    return RawGraph(num_nodes, edges, node_fields, edge_fields, manifest.graph_fields, manifest.source)


def ends_of(owners: list[OwnerEdges], rank: int, starts: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The new id of the source of each edge of a rank, and the row of its destination."""
    src, dst = [], []
    for owner, (edges, first) in enumerate(zip(owners, starts)):
        assert edges.src_rows.dtype == torch.int32
        rows = edges.src_rows if owner == rank else edges.needed[edges.src_rows.long()]
        src.append(rows.long() + first)
        dst.append(torch.arange(edges.indptr.numel() - 1).repeat_interleave(edges.indptr.diff().long()))
    return torch.cat(src), torch.cat(dst)


def _scattered(ids: torch.Tensor, pieces: list[torch.Tensor]) -> torch.Tensor:
    """Rows put where `ids` say; every place exactly once."""
    assert torch.equal(ids.sort().values, torch.arange(ids.numel()))
    signed = {torch.uint16: torch.int16}
    rows = torch.cat(pieces)
    dtype = rows.dtype
    return rows.view(signed.get(dtype, dtype))[ids.argsort()].view(dtype)


def assert_same(found: RawGraph, expected: RawGraph) -> None:
    """Equal in everything: types, edges in order, fields, dtypes and every number."""
    expected = expected.validate()
    assert dict(found.num_nodes) == dict(expected.num_nodes)
    assert list(found.edges) == list(expected.edges)
    assert dict(found.graph_fields) == dict(expected.graph_fields)
    for kind, arrays in expected.edges.items():
        assert torch.equal(found.edges[kind].src, arrays.src.long())
        assert torch.equal(found.edges[kind].dst, arrays.dst.long())
    for group in ("node_fields", "edge_fields"):
        for kind, fields in getattr(expected, group).items():
            assert list(getattr(found, group)[kind]) == list(fields)
            for name, field in fields.items():
                stored = getattr(found, group)[kind][name]
                dense = field.to_dense()
                assert stored.dtype == dense.dtype
                assert stored.shape == dense.shape
                bits = (stored.contiguous().view(-1).view(torch.uint8), dense.contiguous().view(-1).view(torch.uint8))
                assert torch.equal(*bits), f"{kind} {name}"


def position_of(path: Path, key: str) -> int:
    """Where the bytes of a tensor begin in a part file."""
    content = path.read_bytes()
    length = 8 + int.from_bytes(content[:8], "little")
    return length + json.loads(content[8:length])[key]["data_offsets"][0]


def assert_sorted(store: Store) -> None:
    """Each part keeps its promises: ascending original ids, edges by (source part, destination, original id)."""
    for part in range(store.num_parts):
        for ids in merge_parts(store, store.num_parts, part).node_ids.values():
            assert (ids.diff() > 0).all()
        for kind in store.manifest.edge_types:
            edges = store.part_edges(kind, part)
            owners = [edges.from_part(source) for source in range(store.num_parts)]
            assert [owner.src_rows.numel() for owner in owners] == list(edges.counts)
            src_parts = torch.arange(store.num_parts).repeat_interleave(torch.tensor(edges.counts))
            _, dst = ends_of(owners, part, store.manifest.offsets[kind[0]][:-1])
            order = list(zip(src_parts.tolist(), dst.tolist(), store.edge_ids(kind, part).tolist()))
            assert order == sorted(order)
            for source, owner in enumerate(owners):
                assert (owner.needed.diff() > 0).all()
                if source != part:  # each halo row is some edge's source
                    assert torch.equal(owner.src_rows.unique(), torch.arange(owner.needed.numel()).int())
