"""The models that `shardpass train` knows: those of torch_geometric.nn.models, unmodified."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shardpass.cli.config import TrainConfig
from shardpass.errors import require

NAMES = {"gcn": "GCN", "sage": "GraphSAGE", "gat": "GAT", "gin": "GIN", "pna": "PNA", "edgecnn": "EdgeCNN"}
_PNA = {"aggregators": ["mean", "min", "max", "std"], "scalers": ["identity", "amplification", "attenuation"]}


def build_model(
    config: TrainConfig, num_features: int, num_classes: int, in_degree_histogram: Tensor | None = None
) -> nn.Module:
    """A new PyG model as `config` describes it.

    Args:
        config: model, layers, hidden, heads, dropout, batch_norm.
        num_features: channels of the node features.
        num_classes: channels of the output.
        in_degree_histogram: number of nodes of each in-degree over the whole graph; needed by PNA.

    Raises:
        ValueError: for an unknown model or sizes that do not fit.
        MissingDependencyError: without PyG.
    """
    if config.model not in NAMES:
        raise ValueError(f"unknown model {config.model!r}; the models are {', '.join(NAMES)}")
    if config.model == "gat" and config.hidden % config.heads:
        raise ValueError(
            f"--hidden {config.hidden} is not a multiple of --heads {config.heads}: the heads of a GAT layer share the "
            f"hidden channels evenly"
        )
    models = require("torch_geometric.nn.models", "pyg", "shardpass train")
    options: dict[str, Any] = {}
    if config.model == "gat":
        options["heads"] = config.heads
    if config.model == "pna":
        options.update(_PNA, deg=in_degree_histogram)
    make = getattr(models, NAMES[config.model])
    model: nn.Module = make(
        num_features,
        config.hidden,
        config.layers,
        num_classes,
        dropout=config.dropout,
        norm="batch_norm" if config.batch_norm else None,
        **options,
    )
    return model.to(getattr(torch, config.dtype))
