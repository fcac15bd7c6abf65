"""What the cases of ``sar_program.py`` share: partitions, seeded models, one step, errors as text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardpass.errors import RefusedError, ShardpassError
from shardpass.frontends import sar

Results = dict[str, Any]


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


def trained_once(model: nn.Module, graph: Any, features: Tensor, rows: Any = None) -> Results:
    """One step's gradients, summed over ranks, and the outputs."""
    sar.sync_params(model)
    x = features.clone().requires_grad_()
    out = model(graph, x)
    (out if rows is None else out[rows]).pow(3).sum().backward()
    sar.gather_grads(model)
    return {"out": out.detach(), "x_grad": x.grad, "grads": gradients(model)}


def told(function: Callable[[], Any]) -> str:
    """The error that every rank gets."""
    try:
        function()
    except (ValueError, ShardpassError, RefusedError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def without(data: sar.PartitionData, name: str) -> sar.PartitionData:
    return data._replace(node_features={key: rows for key, rows in data.node_features.items() if key != name})
