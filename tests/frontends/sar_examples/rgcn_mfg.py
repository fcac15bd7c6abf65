"""R-GCN on a graph of several types, in message flow graphs of the labelled nodes."""

from __future__ import annotations

import argparse
from typing import Any

import dgl
import torch
import torch.nn.functional as F

from frontends.sar_examples.data import joined, total
from frontends.sar_examples.models import RelationalModel
from shardpass.frontends import sar


def main(args: argparse.Namespace) -> dict[str, Any]:
    partition_data = joined(args)
    stored = partition_data.node_features
    is_paper = stored[dgl.NTYPE] == partition_data.node_type_names.index("paper")
    train = is_paper.nonzero().view(-1)[sar.suffix_key_lookup(stored, "train_mask")]
    blocks = sar.construct_mfgs(partition_data, train + partition_data.node_ranges[sar.rank()][0], n_layers=2)
    features = {kind: stored[f"{kind}/features"][blocks[0].srcnodes(kind)] for kind in blocks[0].srctypes}
    labels = sar.suffix_key_lookup(stored, "labels")[blocks[-1].dstnodes("paper")]
    model = RelationalModel([name for _, name, _ in partition_data.edge_type_names])
    sar.sync_params(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    n_train, losses = total(labels.numel()), []
    for _ in range(4):
        loss = F.cross_entropy(model(blocks, features)["paper"], labels, reduction="sum") / n_train
        optimizer.zero_grad()
        loss.backward()
        sar.gather_grads(model)
        optimizer.step()
        losses.append(total(loss).item())
    return {"losses": losses}
