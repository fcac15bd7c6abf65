"""`Task`: the tensors a training run needs from a graph, or a sentence about what is missing."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shardpass.cli.config import TrainConfig
from shardpass.core.graphs import ShardedGraph

SPLITS = ("train", "val", "test")


@dataclass
class Task:
    """Own rows of features, labels and masks. A split of which no mask is stored is absent."""

    x: Tensor
    y: Tensor
    masks: dict[str, Tensor]


def read_task(graph: ShardedGraph, config: TrainConfig) -> Task:
    """What `config` trains on. Not collective: every rank finds the same fields, so all raise or none.

    Raises:
        ValueError: features, labels or the training mask are missing or of the wrong kind.
    """
    known = ", ".join(sorted(graph.node)) or "none"
    where = f"the store {config.store}"
    if "x" not in graph.node:
        raise ValueError(
            f"{where} has no node features: no field 'x' (node fields: {known}); "
            f"partition with the features under that name"
        )
    if "y" not in graph.node:
        raise ValueError(f"{where} has no labels: no node field 'y' (node fields: {known}); partition with labels")
    x, y = graph.x, graph.y
    if y.is_floating_point() or y.dim() != 1:
        kind = str(y.dtype).removeprefix("torch.")
        raise ValueError(
            f"shardpass train needs one class id per node, but y is {kind} of the row shape {list(y.shape[1:])}: write "
            f"a training script for other targets"
        )
    masks = {}
    for split in SPLITS:
        name = f"{config.mask_prefix}{split}_mask"
        if name in graph.node:
            masks[split] = _mask(graph.node[name], name, config.split)
    if "train" not in masks:
        raise ValueError(_no_mask(graph, config, where, known))
    x = x.to_dense() if x.is_sparse else x
    return Task((x if x.dim() > 1 else x[:, None]).to(getattr(torch, config.dtype)), y.long(), masks)


def _mask(mask: Tensor, name: str, split: int) -> Tensor:
    if mask.dim() == 1:
        return mask.bool()
    if split not in range(mask.size(1)):
        raise ValueError(f"{name} has {mask.size(1)} splits; --split is in [0, {mask.size(1)}), got {split}")
    return mask[:, split].bool()


def _no_mask(graph: ShardedGraph, config: TrainConfig, where: str, known: str) -> str:
    name = f"{config.mask_prefix}train_mask"
    others = sorted(field.removesuffix("train_mask") for field in graph.node if field.endswith("train_mask"))
    hint = f"; use --mask-prefix {others[0] or repr('')}" if others else ": partition with masks"
    return f"{where} has no node field {name!r} (node fields: {known}){hint}"


def in_degree_histogram(graph: ShardedGraph) -> Tensor:
    """Number of nodes of each in-degree in the whole graph, ``[largest in-degree + 1]`` int64. Collective."""
    degrees = torch.bincount(graph.edge_index[1].as_subclass(Tensor), minlength=graph.num_nodes)
    largest = degrees.max() if degrees.numel() else torch.tensor(0)
    top = int(graph.comm.all_reduce(largest.reshape(1), "max", "largest in-degree"))
    return graph.comm.all_reduce(torch.bincount(degrees, minlength=top + 1), "sum", "in-degree histogram")
