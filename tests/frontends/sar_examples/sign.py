"""SIGN: features are averaged over neighbours before training, by message passing without gradients."""

from __future__ import annotations

import argparse
from typing import Any

import dgl.function as fn
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from frontends.sar_examples.data import joined, of, total
from shardpass.frontends import sar

HOPS = 3


def averaged(graph: Any, features: Tensor) -> Tensor:
    """The features, and their means over one to three hops."""
    found = [features]
    with torch.no_grad(), graph.local_scope():
        graph.ndata["hop"] = features
        for _ in range(HOPS):
            graph.update_all(fn.copy_u("hop", "m"), fn.mean("m", "hop"))
            found.append(graph.ndata["hop"])
    return torch.cat(found, 1)


def mlp(channels: int) -> nn.Module:
    return nn.Sequential(nn.Linear(channels * (HOPS + 1), 16), nn.PReLU(), nn.Linear(16, 4))


def main(args: argparse.Namespace) -> dict[str, Any]:
    partition_data = joined(args)
    features, labels = of(partition_data, "features"), of(partition_data, "labels")
    train = of(partition_data, "train_mask").nonzero().view(-1)
    rows = averaged(sar.construct_full_graph(partition_data), features)
    model = mlp(features.size(1))
    sar.sync_params(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    n_train, losses = total(train.numel()), []
    for _ in range(5):
        loss = F.cross_entropy(model(rows[train]), labels[train], reduction="sum") / n_train
        optimizer.zero_grad()
        loss.backward()
        sar.gather_grads(model)
        optimizer.step()
        losses.append(total(loss).item())
    return {"losses": losses}
