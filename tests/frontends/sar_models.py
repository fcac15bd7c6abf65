"""What the cases of SAR's scripts share: models, one step, partitions, errors as text.

Models are plain modules; `norm` is nn.BatchNorm1d in one process, sar.DistributedBN1D on several.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import dgl
import dgl.function as fn
import dgl.nn.pytorch as dnn
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardpass.errors import RefusedError, ShardpassError
from shardpass.frontends import sar

Results = dict[str, Any]


class Sage(nn.Module):
    """GraphSAGE with BatchNorm; called with a graph, or with a block for each layer."""

    def __init__(self, norm: Callable[[int], nn.Module], channels: int = 8, classes: int = 3) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            [dnn.SAGEConv(channels, 12, "mean"), dnn.SAGEConv(12, 12, "mean"), dnn.SAGEConv(12, classes, "mean")]
        )
        self.norms = nn.ModuleList([norm(12), norm(12)])

    def forward(self, graph: Any, h: Tensor) -> Tensor:
        blocks = graph if isinstance(graph, list) else [graph] * len(self.convs)
        for block, conv, bn in zip(blocks, self.convs, self.norms):
            h = F.relu(bn(conv(block, h)))
        return self.convs[-1](blocks[-1], h)


class Gat(nn.Module):
    """GAT with BatchNorm."""

    def __init__(self, norm: Callable[[int], nn.Module], channels: int = 8, classes: int = 3) -> None:
        super().__init__()
        self.convs = nn.ModuleList([dnn.GATConv(channels, 6, 2), dnn.GATConv(12, classes, 2)])
        self.norms = nn.ModuleList([norm(12)])

    def forward(self, graph: Any, h: Tensor) -> Tensor:
        h = F.elu(self.norms[0](self.convs[0](graph, h).flatten(1)))
        return self.convs[1](graph, h).mean(1)


class TwoBranches(nn.Module):
    """Two outputs, of which a loss may use one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = dnn.GraphConv(8, 3), dnn.SAGEConv(8, 3, "mean")

    def forward(self, graph: Any, h: Tensor) -> tuple[Tensor, Tensor]:
        return self.first(graph, h), self.second(graph, h)


class EdgeScaled(nn.Module):
    """A message function of the user's, with a parameter in it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 5)

    @sar.message_has_parameters(lambda self: tuple(self.linear.parameters()))
    def message(self, edges: Any) -> dict[str, Tensor]:
        return {"m": torch.tanh(self.linear(edges.src["h"])) * edges.data["w"].unsqueeze(1)}

    def forward(self, graph: Any, h: Tensor) -> Tensor:
        with graph.local_scope():
            graph.srcdata["h"] = h
            graph.update_all(self.message, fn.sum("m", "out"))
            return graph.dstdata["out"]


class Hetero(nn.Module):
    """A convolution per relation."""

    def __init__(self, edge_types: list[Any]) -> None:
        super().__init__()
        kinds = sorted({kind[1] for kind in edge_types})
        self.conv = dnn.HeteroGraphConv({kind: dnn.SAGEConv(8, 5, "mean") for kind in kinds}, aggregate="sum")

    def forward(self, graph: Any, h: Any) -> Any:
        return self.conv(graph, h)


class RelGcn(nn.Module):
    """R-GCN on the homogeneous graph."""

    def __init__(self, conv: Any, num_types: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList([conv(8, 6, num_types, "basis", 2), conv(6, 3, num_types, "bdd", 3)])

    def forward(self, graph: Any, h: Tensor, presorted: bool = False) -> Tensor:
        blocks = graph if isinstance(graph, list) else [graph] * 2
        h = torch.tanh(self.convs[0](blocks[0], h, blocks[0].edata[dgl.ETYPE], presorted=presorted))
        return self.convs[1](blocks[1], h, blocks[1].edata[dgl.ETYPE], presorted=presorted)


# ---- steps


def seeded(make: Callable[..., nn.Module], *args: Any) -> nn.Module:
    """A model in float64 whose parameters are the same in every process."""
    torch.manual_seed(7)
    return make(*args).double()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def part_of(directory: Path, name: str) -> str:
    return str(directory / name / f"{name}.json")


def loaded(directory: Path, name: str = "homo") -> tuple[sar.PartitionData, Tensor]:
    data = sar.load_dgl_partition_data(part_of(directory, name), sar.rank(), torch.device("cpu"))
    return data, sar.suffix_key_lookup(data.node_features, "feat")


def trained_once(model: nn.Module, graph: Any, features: Tensor, ready: bool = True) -> Results:
    """One step's gradients, summed over ranks, the outputs, and the original ids of the rows given and computed."""
    if ready:
        sar.sync_params(model)
    x = features.clone().requires_grad_()
    out = model(graph, x)
    out.pow(3).sum().backward()
    sar.gather_grads(model)
    first, last = (graph[0], graph[-1]) if isinstance(graph, list) else (graph, graph)
    ids = {"inputs": first.srcdata["orig_id"], "ids": last.dstdata["orig_id"]}
    return {"out": out.detach(), "x_grad": x.grad, "grads": gradients(model)} | ids


def told(function: Callable[[], Any]) -> str:
    """The error that every rank gets."""
    try:
        function()
    except (ValueError, ShardpassError, RefusedError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def without(data: sar.PartitionData, name: str) -> sar.PartitionData:
    return data._replace(node_features={key: rows for key, rows in data.node_features.items() if key != name})
