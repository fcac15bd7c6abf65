"""The models that the command line knows: those of `torch_geometric.nn.models`, unmodified."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
import typer
from torch import Tensor, nn

from shardpass.core.graphs import ShardedGraph
from shardpass.errors import require

ModelName = Literal["gcn", "sage", "gat", "gin", "pna", "edgecnn"]
Dtype = Literal["float32", "float64"]
MODELS = {"gcn": "GCN", "sage": "GraphSAGE", "gat": "GAT", "gin": "GIN", "pna": "PNA", "edgecnn": "EdgeCNN"}
_PNA = {"aggregators": ["mean", "min", "max", "std"], "scalers": ["identity", "amplification", "attenuation"]}


@dataclass(frozen=True)
class ModelConfig:
    """Which model to build, as plain data: the options of several commands."""

    model: Annotated[ModelName, typer.Option(help="Of torch_geometric.nn.")] = "sage"
    layers: Annotated[int, typer.Option(min=1, help="Number of layers.")] = 2
    hidden: Annotated[int, typer.Option(min=1, help="Hidden channels.")] = 64
    heads: Annotated[int, typer.Option(min=1, help="Attention heads (gat).")] = 4
    dropout: Annotated[float, typer.Option(min=0, max=1, help="Dropout between layers.")] = 0.0
    batch_norm: Annotated[bool, typer.Option(help="BatchNorm between layers, over the nodes of all ranks.")] = False
    dtype: Annotated[Dtype, typer.Option(help="Of features and parameters.")] = "float32"
    edge_weight: Annotated[str, typer.Option(help="The edge field that gcn takes for weights of edges.")] = ""
    recompute: Annotated[
        bool, typer.Option("--recompute", help="Compute norms, activations and dropout again in backward.")
    ] = False

    def __post_init__(self) -> None:
        if self.model == "gat" and self.hidden % self.heads:
            raise ValueError(
                f"--hidden {self.hidden} is not a multiple of --heads {self.heads}: the heads of a GAT layer share the "
                f"hidden channels evenly"
            )

    @property
    def checkpoint_of_wrap(self) -> Literal["activations"] | None:
        """The argument `checkpoint` of ``wrap`` and of ``plan``."""
        return "activations" if self.recompute else None

    @property
    def torch_dtype(self) -> torch.dtype:
        return {"float32": torch.float32, "float64": torch.float64}[self.dtype]

    def build(self, num_features: int, num_classes: int, in_degrees: Tensor | None = None) -> nn.Module:
        """A new PyG model. Without `in_degrees` (see `in_degrees_for`), a ``"pna"`` is of the right size and wrong."""
        models = require("torch_geometric.nn.models", "pyg", "shardpass train")
        options: dict[str, Any] = {}
        if self.model == "gat":
            options["heads"] = self.heads
        if self.model == "pna":
            options = {**_PNA, "deg": torch.ones(2, dtype=torch.int64) if in_degrees is None else in_degrees}
        make = getattr(models, MODELS[self.model])
        if self.edge_weight and not make.supports_edge_weight:
            raise ValueError(f"--edge-weight {self.edge_weight}: {self.model} takes no weights of edges; gcn does")
        norm = "batch_norm" if self.batch_norm else None
        model: nn.Module = make(
            num_features, self.hidden, self.layers, num_classes, dropout=self.dropout, norm=norm, **options
        )
        return model.to(self.torch_dtype)


def in_degrees_for(config: ModelConfig, graph: ShardedGraph) -> Tensor | None:
    """Number of nodes of each in-degree in the whole graph, ``[largest in-degree + 1]`` int64. Collective.

    `None` for models that do not ask for it.
    """
    if config.model != "pna":
        return None
    degrees = torch.bincount(graph.edge_index[1].as_subclass(Tensor), minlength=graph.num_own_nodes)
    largest = degrees.max() if degrees.numel() else torch.tensor(0)
    top = int(graph.comm.all_reduce(largest.reshape(1), "max", "largest in-degree"))
    return graph.comm.all_reduce(torch.bincount(degrees, minlength=top + 1), "sum", "in-degree histogram")
