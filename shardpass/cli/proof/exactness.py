"""A small model in float64, trained one step on these ranks and on the whole graph in one process."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardpass as sp
from shardpass.cli.graphs import powerlaw
from shardpass.core.graphs import ShardedGraph
from shardpass.core.ranks import MODES, Options, Ranks
from shardpass.errors import MissingDependencyError, require
from shardpass.testing import WholeGraph, assignments, shard_in_memory

BOUND = 1e-9


@dataclass(frozen=True)
class Exactness:
    """What was compared, and the largest error of each mode; relative to the largest entry of a tensor if above 1."""

    model: str
    graph: str
    errors: dict[str, float]


def compare(comm: Ranks) -> Exactness | None:
    """The largest difference in outputs, loss and gradients of inputs and parameters; the same on every rank.

    `None` if neither PyG nor DGL is installed on some rank. Collective.
    """
    library = min(comm.all_gather_object(_library(), "test: library"))
    if not library:
        return None
    graph = _graph(comm.size)
    with sp.seed(0, comm):
        model = _model(library)
    expected = _whole(library, copy.deepcopy(model), graph)
    owners = assignments(graph.num_nodes, comm.size, graph.edge_index)["random"]
    parts = [shard_in_memory(graph, owners, comm, Options(mode=mode)) for mode in MODES]
    errors = [_error(comm, library, model, part, expected) for part in parts]
    largest = comm.all_reduce(torch.tensor(errors, dtype=torch.float64), "max", "test: errors").tolist()
    text = f"{graph.num_nodes:,} nodes and {graph.edge_index.size(1):,} edges"
    return Exactness(f"GAT of {'PyG' if library == 'pyg' else 'DGL'}", text, dict(zip(MODES, largest)))


def _library() -> str:
    for library, module in (("pyg", "torch_geometric"), ("dgl", "dgl")):
        try:
            require(module, library, "shardpass test")
        except MissingDependencyError:
            continue
        return library
    return ""


def _graph(ranks: int) -> WholeGraph:
    arrays = {name: torch.from_numpy(value) for name, value in powerlaw(max(400, 20 * ranks), 8, 6, 4).items()}
    edge_index = arrays.pop("edge_index").long()
    loops = torch.arange(len(arrays["x"])).expand(2, -1)  # DGL's GAT wants an edge into every node
    arrays["x"] = arrays["x"].double()
    return WholeGraph(len(arrays["x"]), torch.cat([edge_index, loops], 1), arrays)


def _model(library: str) -> nn.Module:
    if library == "pyg":
        from torch_geometric.nn import GAT

        return GAT(6, 8, num_layers=2, out_channels=4, heads=2).double()
    from dgl.nn import GATConv

    model: nn.Module = GATConv(6, 4, num_heads=1).double()
    return model


def _called(library: str, model: nn.Module, x: Tensor, graph: Any) -> Tensor:
    out: Tensor = model(x, graph) if library == "pyg" else model(graph, x).flatten(1)
    return out


def _whole(library: str, model: nn.Module, graph: WholeGraph) -> dict[str, Tensor]:
    x, edges = graph.node["x"].clone().requires_grad_(), graph.edge_index
    if library == "dgl":
        import dgl

        edges = dgl.graph(tuple(edges), num_nodes=graph.num_nodes)
    out = _called(library, model, x, edges)
    mask = graph.node["train_mask"]
    loss = F.cross_entropy(out[mask], graph.node["y"][mask])
    loss.backward()
    assert x.grad is not None
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return {"output": out.detach(), "loss": loss.detach(), "x": x.grad, **gradients}


def _error(comm: Ranks, library: str, model: nn.Module, graph: ShardedGraph, expected: dict[str, Tensor]) -> float:
    """The largest error of this rank; infinite for a NaN. Collective."""
    model = (sp.pyg if library == "pyg" else sp.dgl).wrap(copy.deepcopy(model), comm)
    x = graph.x.detach().clone().requires_grad_()
    out = _called(library, model, x, graph)
    loss = sp.cross_entropy(out, graph.y, graph.train_mask, comm)
    loss.backward()
    found = {"output": out, "loss": loss, "x": x.grad}
    found |= {name: parameter.grad for name, parameter in model.named_parameters()}
    rows = graph.node_ids
    return max(
        _difference(found[name], value[rows] if name in ("output", "x") else value) for name, value in expected.items()
    )


def _difference(found: Tensor | None, expected: Tensor) -> float:
    if not expected.numel():
        return 0.0
    if found is None or found.shape != expected.shape:
        return float("inf")
    error = float((found.detach() - expected).abs().max()) / max(1.0, float(expected.abs().max()))
    return error if error == error else float("inf")
