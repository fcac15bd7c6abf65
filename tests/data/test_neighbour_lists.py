"""Edges as libraries of atoms and meshes return them: they go into `shard` as they are, or the error says what to pass.

The libraries are tested where they are installed; arrays of their types and layouts stand in for them everywhere.
"""

import copy
import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy.spatial import Delaunay, cKDTree
from torch_geometric.data import Batch, Data
from torch_geometric.nn import GATConv
from torch_geometric.transforms import FaceToEdge

import shardpass as sp
from shardpass.testing import run

CUTOFF = 3.0
CELL = np.diag([7.2, 7.2, 7.2]) + np.array([[0, 0.4, 0], [0, 0, 0], [0.2, 0, 0]])
POINTS = np.random.default_rng(0).random((32, 3)) @ CELL


def periodic_pairs() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Atom, neighbour and shift of each pair, as ``neighbor_list("ijS", ...)`` returns them."""
    shifts = np.array(np.meshgrid(*[[-1, 0, 1]] * 3)).reshape(3, -1).T
    way = POINTS[None, :, None] + (shifts @ CELL)[None, None] - POINTS[:, None, None]
    distance = np.linalg.norm(way, axis=-1)
    i, j, s = ((distance < CUTOFF) & (distance > 0)).nonzero()
    return i, j, shifts[s]


def _atoms() -> Any:
    return importlib.import_module("ase").Atoms("Cu32", positions=POINTS, cell=CELL, pbc=True)


def _vesin_points() -> tuple[Any, ...]:
    made = importlib.import_module("vesin").NeighborList(cutoff=CUTOFF, full_list=True)
    pairs, shifts = made.compute(points=POINTS, box=CELL, periodic=True, quantities="PS")
    return *pairs.T, shifts


OF_LIBRARIES: dict[str, Callable[[], tuple[Any, ...]]] = {
    "ase": lambda: importlib.import_module("ase.neighborlist").neighbor_list("ijS", _atoms(), CUTOFF),
    "matscipy": lambda: importlib.import_module("matscipy.neighbours").neighbour_list("ijS", _atoms(), CUTOFF),
    "vesin": lambda: importlib.import_module("vesin").ase_neighbor_list("ijS", _atoms(), CUTOFF),
    "vesin's own": _vesin_points,
}
STAND_INS: dict[str, Callable[[], tuple[Any, ...]]] = {
    name: lambda ids=ids, shift=shift: tuple(a.astype(t) for a, t in zip(periodic_pairs(), (ids, ids, shift)))
    for name, ids, shift in (
        ("int64", np.int64, np.int64), ("int32", np.int32, np.int32), ("unsigned", np.uint64, np.int32),
        ("big-endian", np.dtype(">i8"), np.float64),
    )
}  # fmt: skip


def check(give: Callable[[Any, Any], Any], pairs: tuple[Any, ...], ranks: int = 2) -> None:
    """Raise unless a layer with vectors between atoms gives what PyG gives in one process."""
    i, j, shifts = pairs
    torch.manual_seed(0)
    layer, x = GATConv(4, 3, edge_dim=3).double(), torch.randn(32, 4, dtype=torch.float64)
    ways = torch.from_numpy(POINTS[j.astype(int)] - POINTS[i.astype(int)] + shifts @ CELL)
    edges = torch.from_numpy(np.stack([j, i]).astype(np.int64))
    expected = layer(x, edges, ways)

    def work(comm: Any) -> None:
        graph = sp.shard({"edge_index": give(j, i), "edge_shift": shifts, "pos": POINTS}, comm, by="space")
        assert graph.own(torch.from_numpy(shifts.astype(float)), "edges").tolist() == graph.edge_shift.tolist()
        src, dst = edges
        own = graph.own(torch.from_numpy(POINTS)[src] - torch.from_numpy(POINTS)[dst], "edges")
        vectors = own + graph.edge_shift.double() @ torch.from_numpy(CELL)
        out = sp.pyg.wrap(copy.deepcopy(layer), comm)(graph.own(x), graph, vectors)
        torch.testing.assert_close(graph.whole(out), expected)

    run(work, ranks)


@pytest.mark.parametrize("name", OF_LIBRARIES)
def test_lists_of_libraries(name: str) -> None:
    for module in {"ase", name.split("'")[0]}:
        pytest.importorskip(module)
    pairs = OF_LIBRARIES[name]()
    assert len(pairs[0]) == len(periodic_pairs()[0])
    check(lambda j, i: (j, i), pairs)


@pytest.mark.parametrize("name", STAND_INS)
def test_lists_of_their_types(name: str) -> None:
    check(lambda j, i: (j, i), STAND_INS[name]())


LAYOUTS: dict[str, Callable[[Any, Any], Any]] = {
    "an array": lambda j, i: np.stack([j, i]),
    "a turned array": lambda j, i: np.stack([j, i], 1).T,
    "a list of arrays": lambda j, i: [j, i],
    "a list of lists": lambda j, i: [j.tolist(), i.tolist()],
    "two types": lambda j, i: (j.astype(np.uint64), i.astype(np.int32)),
    "tensors": lambda j, i: (torch.from_numpy(j), torch.from_numpy(i)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str) -> None:
    check(LAYOUTS[layout], periodic_pairs())


def test_pairs_of_scipy() -> None:
    """Each pair once, and a matrix of distances, which holds both directions and each point itself."""
    tree = cKDTree(POINTS)
    pairs = tree.query_pairs(CUTOFF, output_type="ndarray").T
    both = sp.shard({"edge_index": np.concatenate([pairs, pairs[::-1]], 1), "pos": POINTS})
    matrix = sp.shard({"adj_t": tree.sparse_distance_matrix(tree, CUTOFF), "pos": POINTS})
    assert sp.shard({"edge_index": pairs, "pos": POINTS}).total_edges * 2 == both.total_edges
    assert matrix.total_edges == both.total_edges + 32
    assert float(matrix.edge_weight.max()) <= CUTOFF


def test_a_mesh() -> None:
    """Points and cells, as `meshio.read` returns them: int64 or int32, big-endian from VTK."""
    points = np.random.default_rng(0).random((20, 2))
    cells = Delaunay(points).simplices.astype(">i8")
    data = Data(pos=torch.tensor(points.astype(float)), face=torch.tensor(cells.astype(np.int64)).T, T=torch.rand(20))
    with pytest.raises(ValueError, match=r"no edge_index; torch_geometric.transforms.FaceToEdge\(\) makes it"):
        sp.shard(data)
    expected = FaceToEdge()(data).edge_index

    def work(comm: Any) -> None:
        graph = sp.shard(FaceToEdge(remove_faces=False)(data), comm, by="space", drop=["face"])
        assert graph.total_edges == expected.size(1) and torch.equal(graph.whole(graph.T), data.T)

    run(work, 2)


def test_a_mesh_of_meshio(tmp_path: Any) -> None:
    meshio = pytest.importorskip("meshio")
    points = np.random.default_rng(0).random((20, 3))
    mesh = meshio.Mesh(points, [("triangle", Delaunay(points[:, :2]).simplices)], point_data={"T": np.arange(20.0)})
    mesh.write(tmp_path / "mesh.vtu")
    mesh = meshio.read(tmp_path / "mesh.vtu")
    with pytest.raises(TypeError, match=r"a graph from a Mesh: pass Data\(pos=..., face=...\)"):
        sp.shard(mesh)
    face = torch.tensor(mesh.cells_dict["triangle"].astype(np.int64)).T
    edges = FaceToEdge()(Data(face=face, num_nodes=20)).edge_index
    graph = sp.shard({"edge_index": edges, "pos": mesh.points, **mesh.point_data})
    assert graph.T.tolist() == list(range(20)) and graph.total_edges == edges.size(1)


def test_fields_of_a_structure() -> None:
    """With one row, as PyG keeps what belongs to a whole graph: the same as in a batch of one."""
    data = Data(
        pos=torch.rand(4, 3), edge_index=torch.tensor([[0, 1], [1, 2]]), cell=torch.eye(3)[None], y=torch.ones(1, 2)
    )
    for given in (data, Batch.from_data_list([data])):
        graph = sp.shard(given)
        assert graph.cell.shape == (1, 3, 3) and graph.y.tolist() == [[1, 1]]
    one = Data(pos=torch.rand(2, 3), edge_index=torch.tensor([[0], [1]]), length=torch.ones(1))
    assert sp.shard(one).edge["length"].tolist() == [1]  # which PyG, too, takes to be of the only edge


PAIRS = {"pos": POINTS}
REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "a set": (lambda: {"edge_index": cKDTree(POINTS).query_pairs(1.0), **PAIRS}, TypeError, r"numpy.array\(\[\*pairs"),
    "rows of pairs": (
        lambda: {"edge_index": cKDTree(POINTS).query_pairs(CUTOFF, output_type="ndarray"), **PAIRS}, ValueError,
        "transpose it",
    ),
    "a list for each point": (
        lambda: {"edge_index": cKDTree(POINTS).query_ball_point(POINTS, CUTOFF), **PAIRS}, TypeError,
        "lists of different lengths",
    ),
    "shifts beside them": (
        lambda: {"edge_index": periodic_pairs(), **PAIRS}, ValueError, "is 3 arrays; .* such as edge_shift",
    ),
    "as many sources as not": (
        lambda: {"edge_index": (np.arange(3), np.arange(2)), **PAIRS}, ValueError, "3 sources and 2 destinations",
    ),
    "shifts by another name": (
        lambda: {"edge_index": periodic_pairs()[:2], "shifts": periodic_pairs()[2], **PAIRS}, ValueError,
        "shifts has .* names of edge fields begin with edge_",
    ),
    "a cell of three rows": (
        lambda: Data(pos=torch.rand(4, 3), edge_index=torch.zeros(2, 1).long(), cell=torch.eye(3)), ValueError,
        r"field 'cell' .* leave it out with drop=\['cell'\] of shardpass.shard",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_to_pass_instead(case: str) -> None:
    given, kind, words = REFUSED[case]
    with pytest.raises(kind, match=words):
        sp.shard(given())


def test_atoms_are_no_dataset() -> None:
    pytest.importorskip("ase")
    with pytest.raises(TypeError, match=r"a graph from a Atoms: pass a dict, \{'edge_index': \(j, i\)"):
        sp.shard(_atoms())
