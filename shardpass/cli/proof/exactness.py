"""A small model in float64, trained one step on these ranks and on the whole graph in one process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import shardpass as sp
from shardpass.cli.graphs import powerlaw
from shardpass.core.ranks import MODES, Options, Ranks
from shardpass.errors import MissingDependencyError, require
from shardpass.testing import Outcome, WholeGraph, assignments, differences, evaluate_whole
from shardpass.testing.parity import evaluate_rank

BOUND = 1e-9


@dataclass(frozen=True)
class Exactness:
    """What was compared, and the largest error of each mode; relative to the largest entry of a tensor if above 1."""

    model: str
    graph: str
    errors: dict[str, float]


def compare(comm: Ranks) -> Exactness | None:
    """The largest difference in outputs and in gradients of inputs and parameters; the same on every rank.

    `None` if neither PyG nor DGL is installed on some rank. Collective.
    """
    library = min(comm.all_gather_object(_library(), "test: library"))
    if not library:
        return None
    graph = _graph(comm.size)
    with sp.seed(0, comm):
        model = _model(library)
    call, wrap = (_call_pyg, sp.pyg.wrap) if library == "pyg" else (_call_dgl, sp.dgl.wrap)
    whole = evaluate_whole(model, graph, call)
    owners = assignments(graph.num_nodes, comm.size, graph.edge_index)["random"]
    errors = []
    for mode in MODES:
        mine, rows, inputs = evaluate_rank(comm, model, graph, call, owners, wrap, Options(mode=mode), whole)
        expected = Outcome(
            whole.output[rows[""]],  # type: ignore[index]
            {name: whole.inputs[name][of_input] for name, of_input in inputs.items()},
            whole.parameters,
        )
        errors.append(max(differences(expected, mine, relative=True).values()))
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


def _call_pyg(model: nn.Module, fields: dict[str, Tensor], edges: Any) -> Tensor:
    out: Tensor = model(fields["x"], edges)
    return out


def _call_dgl(model: nn.Module, fields: dict[str, Tensor], edges: Any) -> Tensor:
    if isinstance(edges, Tensor):
        import dgl

        edges = dgl.graph(tuple(edges), num_nodes=len(fields["x"]))
    out: Tensor = model(edges, fields["x"])
    return out.flatten(1)
