"""`Task`: the tensors that a training run needs from a graph, or a sentence about what is missing."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import shardpass as sp
from shardpass.core.graphs import ShardedGraph
from shardpass.core.ranks import Ranks, describe

SPLITS = ("train", "val", "test")
FEATURES = ("x", "feat")
LABELS = ("y", "label")
"""What the fields are called: PyG's name, and the one of DGL's own graphs, which is taken if there is no other."""


@dataclass(frozen=True)
class Task:
    """Own rows of features, labels and masks. Masks leave unlabelled nodes (-1) out; empty splits are absent.

    The number of classes is that of all ranks.
    """

    x: Tensor
    y: Tensor
    masks: dict[str, Tensor]
    edge_weight: Tensor | None
    num_classes: int

    def output(self, model: nn.Module, graph: ShardedGraph) -> Tensor:
        """The output of `model` for own nodes. Collective."""
        found: Tensor = model(*model_inputs(self.x, graph, self.edge_weight))
        return found

    def note(self, comm: Ranks) -> str:
        """A line with the number of classes, and of those that no node has. Collective."""
        counts = comm.all_reduce(torch.bincount(self.y[self.y >= 0], minlength=self.num_classes), "sum", "classes")
        empty = torch.nonzero(counts == 0)
        if not len(empty):
            return f"{self.num_classes:,} classes"
        return (
            f"{self.num_classes:,} classes, of which {len(empty):,} have no node, such as {int(empty[0])}: the model "
            f"has an output for each, since class ids count from 0"
        )


def loaded(path: str | Path, comm: Ranks, options: sp.Options) -> ShardedGraph:
    """The graph of a store, of which a command takes all that it needs: in which order the nodes are is no matter."""
    if comm.size > 1:
        return sp.load(path, comm, options)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*not in the original order")
        return sp.load(path, comm, options)


def model_inputs(x: Tensor, graph: ShardedGraph, edge_weight: Tensor | None) -> tuple[Any, ...]:
    """What a model of the command is called with."""
    return (x, graph) if edge_weight is None else (x, graph, edge_weight)


def edge_weight_of(graph: ShardedGraph, name: str, dtype: torch.dtype) -> Tensor | None:
    """The own rows of the edge field `name`, ``[num_own_edges]``; `None` for an empty name."""
    if not name:
        return None
    if name not in graph.edge:
        known = ", ".join(sorted(graph.edge)) or "none"
        raise ValueError(f"--edge-weight {name}: the store has no edge field {name!r} (edge fields: {known})")
    weight: Tensor = graph.edge[name]
    if weight.dim() == 2 and weight.size(1) == 1:
        weight = weight[:, 0]
    if weight.dim() != 1:
        raise ValueError(
            f"--edge-weight {name}: a weight is one number per edge, but rows of {name!r} have the shape "
            f"{list(weight.shape[1:])}"
        )
    return weight.to(dtype)


def unused_edge_fields(graph: ShardedGraph, edge_weight: str) -> str:
    """A line that names the edge fields which no model of the command reads; empty if there is none."""
    unused = [name for name in sorted(graph.edge) if name != edge_weight]
    if not unused:
        return ""
    hint = "" if edge_weight else "; --model gcn takes one by --edge-weight NAME"
    return f"not used: the edge field{'s' if len(unused) > 1 else ''} {', '.join(unused)}{hint}"


def features_of(graph: ShardedGraph, dtype: torch.dtype) -> Tensor:
    """The own rows of the field ``x``, or of DGL's ``feat``, ``[num_nodes, channels]``."""
    x: Tensor = graph.node[_field(graph, FEATURES, "node features")]
    x = x.to_dense() if x.is_sparse else x
    return (x if x.dim() > 1 else x[:, None]).to(dtype)


def num_classes_of(graph: ShardedGraph) -> int:
    """Classes of the labels of all ranks. Collective."""
    name = _field(graph, LABELS, "labels")
    if name == "y":
        return graph.num_classes
    labels = graph.node[name]
    largest = int(labels.max()) if labels.numel() else -1
    return 1 + max(graph.comm.all_gather_object(largest, "number of classes"))


def _field(graph: ShardedGraph, names: tuple[str, str], what: str) -> str:
    """The first of two names that a node field has."""
    for name in names:
        if name in graph.node:
            return name
    raise ValueError(
        f"the store has no {what}: no node field {names[0]!r} or {names[1]!r} ({_known(graph)}); partition with {what} "
        f"under one of these names"
    )


def read_task(graph: ShardedGraph, dtype: torch.dtype, mask_prefix: str, split: int, edge_weight: str) -> Task:
    """What a run trains on. Collective.

    Args:
        mask_prefix: before the names of the mask fields, such as ``made_`` for ``made_train_mask``.
        split: the column of masks that have one per split.
    """
    x = features_of(graph, dtype)
    num_classes = num_classes_of(graph)
    y = graph.node[_field(graph, LABELS, "labels")]
    if y.is_floating_point() or y.dim() != 1:
        hint = "write a training script for other targets, which `shardpass new` begins"
        if tuple(y.shape[1:]) == (1,):
            hint = "partition with y.squeeze(1)"
        elif y.is_floating_point() and y.dim() == 1:
            hint = f"if they are class ids, write them as integers (2, not 2.0) and nothing or -1 for none; else {hint}"
        raise ValueError(
            f"shardpass train needs one class id per node, an integer, but labels are {describe(y)} on this rank: "
            f"{hint}"
        )
    fields = {name: f"{mask_prefix}{name}_mask" for name in SPLITS}
    if fields["train"] not in graph.node:
        others = sorted(field.removesuffix("train_mask") for field in graph.node if field.endswith("train_mask"))
        hint = (
            "partition with masks: --train-mask of an edge list, or in the table of --nodes a column split (train, "
            "val, test or nothing) or train_mask"
        )
        hint = f"use --mask-prefix {others[0] or repr('')}" if others else hint
        raise ValueError(f"the store has no node field {fields['train']!r} ({_known(graph)}): {hint}")
    masks = {name: _column(graph.node[field], field, split) for name, field in fields.items() if field in graph.node}
    masks = {name: mask & (y >= 0) for name, mask in masks.items()}
    counts = graph.comm.all_reduce(torch.stack([mask.sum() for mask in masks.values()]), "sum", "sizes of splits")
    sizes = dict(zip(masks, counts.tolist()))
    if not sizes["train"]:
        raise ValueError(f"{fields['train']} selects no node with a label, so there is nothing to train on")
    used = {name: mask for name, mask in masks.items() if sizes[name]}
    return Task(x, y.long(), used, edge_weight_of(graph, edge_weight, dtype), num_classes)


def _column(mask: Tensor, name: str, split: int) -> Tensor:
    if mask.dim() == 1:
        return mask.bool()
    if split not in range(mask.size(1)):
        raise ValueError(f"{name} has {mask.size(1)} splits; --split is in [0, {mask.size(1)}), got {split}")
    return mask[:, split].bool()


def _known(graph: ShardedGraph) -> str:
    return f"node fields: {', '.join(sorted(graph.node)) or 'none'}"
