"""A small model in float64, trained one step on these ranks and on the whole graph in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
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


def _trained(
    library: str, model: nn.Module, x: Tensor, edges: Any, loss_of: Callable[[Tensor], Tensor]
) -> dict[str, Tensor]:
    """The output, the loss and the gradients of one step."""
    x = x.detach().clone().requires_grad_()
    out: Tensor = model(x, edges) if library == "pyg" else model(edges, x).flatten(1)
    loss = loss_of(out)
    loss.backward()
    gradients = {"x": x.grad, **{name: parameter.grad for name, parameter in model.named_parameters()}}
    found = {name: gradient for name, gradient in gradients.items() if gradient is not None}
    return {"output": out.detach(), "loss": loss.detach(), **found}


def _whole(library: str, model: nn.Module, graph: WholeGraph) -> dict[str, Tensor]:
    edges, mask = graph.edge_index, graph.node["train_mask"]
    if library == "dgl":
        import dgl

        edges = dgl.graph(tuple(edges), num_nodes=graph.num_nodes)
    y = graph.node["y"][mask]
    return _trained(library, model, graph.node["x"], edges, lambda out: F.cross_entropy(out[mask], y))


def _error(comm: Ranks, library: str, model: nn.Module, graph: ShardedGraph, expected: dict[str, Tensor]) -> float:
    """The largest error of this rank; infinite for a NaN. Collective."""
    model = (sp.pyg if library == "pyg" else sp.dgl).wrap(copy.deepcopy(model), comm)
    y, mask = graph.y, graph.train_mask
    found = _trained(library, model, graph.x, graph, lambda out: sp.cross_entropy(out, y, mask, comm))
    rows = graph.node_ids
    return max(
        _difference(found.get(name), value[rows] if name in ("output", "x") else value)
        for name, value in expected.items()
    )


def _difference(found: Tensor | None, expected: Tensor) -> float:
    if not expected.numel():
        return 0.0
    if found is None or found.shape != expected.shape:
        return float("inf")
    error = float((found - expected).abs().max()) / max(1.0, float(expected.abs().max()))
    return error if error == error else float("inf")
