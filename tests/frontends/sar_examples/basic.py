"""Full-batch training of GraphSAGE on one graph, as in the quick start guide."""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F

from frontends.sar_examples.data import joined, of, total
from frontends.sar_examples.models import GNNModel
from shardpass.frontends import sar


def main(args: argparse.Namespace) -> dict[str, Any]:
    partition_data = joined(args)
    features, labels = of(partition_data, "features"), of(partition_data, "labels")
    train, test = (of(partition_data, name).nonzero().view(-1) for name in ("train_mask", "test_mask"))
    shard_manager = sar.construct_full_graph(partition_data)
    del partition_data
    n_train = total(train.numel())
    gnn_model = GNNModel("sage", sar.DistributedBN1D)
    optimizer = torch.optim.Adam(gnn_model.parameters(), lr=0.01)
    sar.sync_params(gnn_model)
    losses = []
    for _ in range(5):
        logits = gnn_model(shard_manager, features)
        loss = F.cross_entropy(logits[train], labels[train], reduction="sum") / n_train
        optimizer.zero_grad()
        loss.backward()
        sar.gather_grads(gnn_model)
        optimizer.step()
        losses.append(total(loss).item())
    gnn_model.eval()
    with torch.no_grad():
        logits = gnn_model(shard_manager, features)
    correct = total((logits[test].argmax(1) == labels[test]).sum())
    return {"losses": losses, "correct": int(correct)}
