"""R-GCN on a graph of several types."""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F

from frontends.sar_examples.data import joined, total
from frontends.sar_examples.models import RelationalModel
from shardpass.frontends import sar


def main(args: argparse.Namespace) -> dict[str, Any]:
    partition_data = joined(args)
    stored = partition_data.node_features
    features = {kind: stored[f"{kind}/features"] for kind in partition_data.node_type_names}
    labels = sar.suffix_key_lookup(stored, "labels")
    train = sar.suffix_key_lookup(stored, "train_mask").nonzero().view(-1)
    graph = sar.construct_full_graph(partition_data)
    model = RelationalModel([name for _, name, _ in partition_data.edge_type_names])
    sar.sync_params(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    n_train, losses = total(train.numel()), []
    for _ in range(4):
        logits = model(graph, features)["paper"]
        loss = F.cross_entropy(logits[train], labels[train], reduction="sum") / n_train
        optimizer.zero_grad()
        loss.backward()
        sar.gather_grads(model)
        optimizer.step()
        losses.append(total(loss).item())
    return {"losses": losses}
