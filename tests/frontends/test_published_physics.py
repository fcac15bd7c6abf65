"""MACE and Anemoi as they are published, on sharded graphs in memory: one process gives the same numbers.

`CONTRIBUTING.md` says how to install them.
"""

import importlib

import pytest
import torch
from torch_geometric.data import Data, HeteroData

import shardpass as sp

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("doubles")]
RANKS = [1, 3, 4]
ROWS = ("positions", "node_attrs", "shifts", "unit_shifts", "batch")
"""What MACE reads of each atom and of each edge."""
ELEMENTS = [1, 8, 14]


def package(name):
    return pytest.importorskip(name, reason=f"{name} is not installed; CONTRIBUTING.md says how to")


@pytest.fixture(scope="module")
def mace():
    with pytest.MonkeyPatch.context() as environment:
        environment.delenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", raising=False)  # mace sets it, for e3nn alone
        package("mace")
        package("matscipy")
        return importlib.import_module("mace.modules")


@pytest.fixture(scope="module")
def layers():
    package("anemoi.models")
    names = ("block", "processor", "mapper")
    found = [importlib.import_module(f"anemoi.models.layers.{name}") for name in names]
    shapes = importlib.import_module("anemoi.models.distributed.shapes")
    return {name: value for module in (*found, shapes) for name, value in vars(module).items()}


def same(found, expected):
    """Raise unless two lists hold the same numbers, or none at the same places."""
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected):
        assert (mine is None) == (theirs is None) or not mine.any()  # a parameter that the loss does not reach
        if theirs is not None:
            torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9 * max(1.0, float(theirs.abs().max())))


def structures(sizes):
    """A batch of MACE's, of periodic structures with so many atoms."""
    atoms = importlib.import_module("ase").Atoms
    data, tools = importlib.import_module("mace.data"), importlib.import_module("mace.tools")
    draws, table, side = torch.Generator().manual_seed(0), tools.AtomicNumberTable(ELEMENTS), 8.0
    lattice = torch.cartesian_prod(*[torch.arange(5.0)] * 3) * side / 5
    items = []
    for size in sizes:
        places = lattice[:size] + 0.15 * torch.randn(size, 3, generator=draws)
        kinds = torch.tensor(ELEMENTS)[torch.randint(0, 3, (size,), generator=draws)]
        structure = atoms(numbers=kinds.numpy(), positions=places.numpy(), cell=[side] * 3, pbc=True)
        config = data.config_from_atoms(structure, head_name="Default")
        items.append(data.AtomicData.from_config(config, z_table=table, cutoff=3.0, heads=["Default"]))
    loader = importlib.import_module("mace.tools.torch_geometric.dataloader").DataLoader
    return next(iter(loader(items, batch_size=len(items), shuffle=False)))


def potential(mace, kind="ScaleShiftMACE", **options):
    irreps = importlib.import_module("e3nn.o3").Irreps
    block = mace.interaction_classes["RealAgnosticResidualInteractionBlock"]
    scaled = {"atomic_inter_scale": 1.3, "atomic_inter_shift": 0.1} if kind == "ScaleShiftMACE" else {}
    given = {
        "r_max": 3.0, "num_bessel": 8, "num_polynomial_cutoff": 6, "max_ell": 2, "interaction_cls": block,
        "interaction_cls_first": block, "num_interactions": 2, "num_elements": 3, "correlation": 3,
        "hidden_irreps": irreps("8x0e + 8x1o"), "MLP_irreps": irreps("16x0e"), "avg_num_neighbors": 12.0,
        "atomic_energies": torch.tensor([-1.0, -2.0, -3.0]).numpy(), "atomic_numbers": ELEMENTS,
        "gate": torch.nn.functional.silu,
    }  # fmt: skip
    torch.manual_seed(0)
    return getattr(mace, kind)(**scaled, **(given | options))


def energies(model, given, calls, comm=None):
    """What the model returns in the last of some calls, and the gradients of its parameters then."""
    for _ in range(calls):
        model.zero_grad()
        found = model({**given, "positions": given["positions"].detach()}, compute_force=False)
        total = found["energy"].square().sum()
        total = total if comm is None else sp.replicated(total, comm)
        (total + found["node_energy"].square().sum()).backward()
    return found, [parameter.grad for parameter in model.parameters()]


def check_energies(make, sizes, ranks, calls=3, **options):
    batch = structures(sizes)
    data = Data(edge_index=batch.edge_index, num_nodes=sum(sizes), **{name: batch[name] for name in ROWS})
    expected, gradients = energies(make(), batch.to_dict(), calls)
    models_of_ranks = [make() for _ in range(ranks)]  # TorchScript compiles in one thread at a time

    def work(comm):
        graph = sp.shard(data, comm, options=sp.Options(**options))
        model = sp.pyg.wrap(models_of_ranks[comm.rank], comm)
        given = {name: graph[name] for name in ROWS} | {"edge_index": graph, "batch": graph.batch}
        found, own = energies(model, given | {name: batch[name] for name in ("cell", "ptr", "head")}, calls, comm)
        rows = [graph.whole(found[name].detach()) for name in ("node_energy", "node_feats")]
        return [found["energy"].detach(), *rows], own

    found, own = sp.spawn(work, ranks)[0]
    same(found, [expected[name].detach() for name in ("energy", "node_energy", "node_feats")])
    same(own, gradients)


@pytest.mark.parametrize("sizes", [(70,), (30, 40, 50)], ids=["a structure", "three structures"])
@pytest.mark.parametrize("ranks", RANKS)
def test_mace(mace, ranks, sizes):
    check_energies(lambda: potential(mace), sizes, ranks)


@pytest.mark.parametrize("mode", ["keep", "halo"])
def test_mace_in_other_modes(mace, mode):
    check_energies(lambda: potential(mace), (30, 40), 3, mode=mode)


def trained(model, given, target, comm=None):
    """What the model returns in the last of three steps of training on forces and stresses, and the gradients then."""
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(3):
        optimizer.zero_grad()
        given["positions"] = given["positions"].detach().clone()
        found = model(dict(given), training=True, compute_force=True, compute_stress=True)
        total = found["energy"].square().sum() + found["stress"].square().sum()
        total = total if comm is None else sp.replicated(total, comm)
        (total + (found["forces"] - target).square().sum() / 44).backward()
        optimizer.step()
    return found, [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("ranks", RANKS)
def test_mace_with_forces_and_stresses(mace, ranks):
    sizes = 20, 24
    batch = structures(sizes)
    target = torch.randn(44, 3, generator=torch.Generator().manual_seed(3))
    data = Data(edge_index=batch.edge_index, num_nodes=44, target=target, **{name: batch[name] for name in ROWS})
    expected, gradients = trained(potential(mace), batch.to_dict(), target)
    models_of_ranks = [potential(mace) for _ in range(ranks)]

    def work(comm):
        graph = sp.shard(data, comm)
        model = sp.pyg.wrap(models_of_ranks[comm.rank], comm)
        given = {name: graph[name] for name in ROWS} | {"edge_index": graph, "batch": graph.batch}
        given |= {name: batch[name] for name in ("cell", "ptr", "head")}
        found, own = trained(model, given, graph.target, comm)
        return [found["energy"].detach(), graph.whole(found["forces"].detach()), found["stress"].detach()], own

    found, own = sp.spawn(work, ranks)[0]
    same(found, [expected[name].detach() for name in ("energy", "forces", "stress")])
    same(own, gradients)


VARIANTS = {
    "no scale and shift": {"kind": "MACE"},
    "a repulsion of pairs, transformed distances": {"pair_repulsion": True, "distance_transform": "Agnesi"},
    "Chebyshev, soft distances": {"radial_type": "chebyshev", "distance_transform": "Soft"},
    "two heads": {"heads": ["Default", "other"], "atomic_energies": [[-1.0, -2.0, -3.0], [-2.0, -1.0, 0.0]]},
    "densities": {
        "interaction_cls_first": "RealAgnosticDensityInteractionBlock",
        "interaction_cls": "RealAgnosticDensityResidualInteractionBlock",
    },
    "another interaction": {"interaction_cls": "RealAgnosticResidualNonLinearInteractionBlock"},
    "one layer": {"num_interactions": 1, "interaction_cls_first": "RealAgnosticInteractionBlock"},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_of_mace(mace, name):
    options = {
        option: mace.interaction_classes.get(value, value) if option.startswith("interaction") else value
        for option, value in VARIANTS[name].items()
    }
    check_energies(lambda: potential(mace, **options), (30, 40), 3, calls=1)


def grid_and_mesh():
    """The nodes of a grid and of a mesh, with edges by destination: within the mesh, and to and from the grid."""
    draws, counts, data = torch.Generator().manual_seed(0), {"grid": 43, "mesh": 17}, HeteroData()
    for kind, count in counts.items():
        data[kind].x = torch.randn(count, 16, generator=draws)
    for src, dst in (("grid", "mesh"), ("mesh", "mesh"), ("mesh", "grid")):
        ends = torch.stack([torch.randint(0, counts[end] - 2, (120,), generator=draws) for end in (src, dst)])
        ends = ends[:, ends[1].argsort(stable=True)]
        widths = {"edge_attr": 8, "edge_wide": 16}  # as they are stored, and as a mapper has embedded them
        fields = {name: torch.randn(120, width, generator=draws) for name, width in widths.items()}
        data[src, "to", dst].edge_index = ends
        for name, rows in fields.items():
            data[src, "to", dst][name] = rows
    return data


GNN = {"in_channels": 16, "out_channels": 16, "num_chunks": 1}
TRANSFORMER = {"in_channels": 16, "hidden_dim": 32, "out_channels": 16, "num_heads": 4, "edge_dim": 8}
LAYERS = {"num_channels": 16, "num_layers": 2, "num_chunks": 2, "edge_dim": 8}
MAPPER = {"in_channels_src": 16, "in_channels_dst": 16, "num_channels": 16, "num_chunks": 1, "edge_dim": 8}
HEADS = {"num_heads": 4, "mlp_hidden_ratio": 2}
WITHIN, TO_MESH, TO_GRID = ("mesh", "to", "mesh"), ("grid", "to", "mesh"), ("mesh", "to", "grid")
ANEMOI = {
    "GraphConvProcessorBlock": (WITHIN, GNN | {"edge_dim": 8}),
    "GraphConvMapperBlock": (TO_MESH, GNN),
    "GraphConvMapperBlock, destinations": (TO_MESH, GNN | {"update_src_nodes": False}),
    "GraphTransformerProcessorBlock": (WITHIN, TRANSFORMER),
    "GraphTransformerProcessorBlock, heads": (WITHIN, TRANSFORMER | {"shard_strategy": "heads", "qk_norm": True}),
    "GraphTransformerMapperBlock": (TO_MESH, TRANSFORMER),
    "GraphTransformerMapperBlock, sources": (TO_MESH, TRANSFORMER | {"update_src_nodes": True, "edge_pre_mlp": True}),
    "GNNProcessor": (WITHIN, LAYERS | {"mlp_extra_layers": 0}),
    "GraphTransformerProcessor": (WITHIN, LAYERS | HEADS),
    "GNNForwardMapper": (TO_MESH, MAPPER | {"mlp_extra_layers": 0}),
    "GNNBackwardMapper": (TO_GRID, MAPPER | {"mlp_extra_layers": 0, "out_channels_dst": 5}),
    "GraphTransformerForwardMapper": (TO_MESH, MAPPER | HEADS | {"shard_strategy": "heads"}),
    "GraphTransformerBackwardMapper": (TO_GRID, MAPPER | HEADS | {"shard_strategy": "heads", "out_channels_dst": 5}),
}


def outputs(layers, name, model, graph, calls):
    """What a module of Anemoi's returns in the last of some calls, and the gradients of its parameters then."""
    src, _, dst = kind = ANEMOI[name][0]
    edges, is_block, is_mapper = graph[kind], "Block" in name, "Mapper" in name
    x = (graph[src].x, graph[dst].x) if is_mapper else graph[src].x
    info = layers["BipartiteGraphShardInfo" if is_mapper else "GraphShardInfo"]()  # in no process group
    if name == "GNNProcessor":
        info = layers["GraphShardInfo"](nodes=[graph[src].x.size(0)])
    if not is_block:
        given = {"x": x, "batch_size": 1, "edge_attr": edges.edge_attr}
    else:
        given = {"x": x, "edge_attr": edges.edge_wide if "ConvMapper" in name else edges.edge_attr}
        if "Transformer" in name:
            given |= {"batch_size": 1, "size": (graph[src].x.size(0), graph[dst].x.size(0))}
    for _ in range(calls):
        model.zero_grad()
        found = model(**given, edge_index=edges.edge_index, shard_info=info)
        found = [rows for one in (found if isinstance(found, tuple) else (found,)) for rows in flat(one)]
        sum(rows.square().sum() for rows in found).backward()
    return found, [parameter.grad for parameter in model.parameters()]


def flat(found):
    return found if isinstance(found, tuple) else (found,)


@pytest.mark.parametrize("mode, ranks", [("sar", 1), ("sar", 3), ("sar", 4), ("keep", 3), ("halo", 3)])
@pytest.mark.parametrize("name", ANEMOI)
def test_anemoi(layers, name, mode, ranks):
    kernels = importlib.import_module("anemoi.models.layers.utils").load_layer_kernels()
    options = ANEMOI[name][1] | {"layer_kernels": kernels if "Block" in name else None}

    def made():
        torch.manual_seed(0)
        return layers[name.partition(",")[0]](**options)

    expected, gradients = outputs(layers, name, made(), data := grid_and_mesh(), 3)
    by_count = {43: "grid", 17: "mesh", 120: ANEMOI[name][0]}

    def work(comm):
        graph = sp.shard(data, comm, options=sp.Options(mode=mode))
        found, own = outputs(layers, name, sp.pyg.wrap(made(), comm), graph, 3)
        whole = [graph.whole(rows.detach(), of=by_count[len(one)]) for rows, one in zip(found, expected)]
        return whole, own

    found, own = sp.spawn(work, ranks)[0]
    same(found, [rows.detach() for rows in expected])
    same(own, gradients)
