"""Training on sampled blocks, and inference on the whole graph by the same model."""

from __future__ import annotations

import argparse
from typing import Any

import dgl
import torch
import torch.nn.functional as F

from frontends.sar_examples.data import joined, of, total
from frontends.sar_examples.models import GNNModel
from shardpass.frontends import sar


def main(args: argparse.Namespace) -> dict[str, Any]:
    partition_data = joined(args)
    features, labels = of(partition_data, "features"), of(partition_data, "labels")
    train_nodes = of(partition_data, "train_mask").nonzero().view(-1) + partition_data.node_ranges[sar.rank()][0]
    full_graph_manager = sar.construct_full_graph(partition_data)
    neighbor_sampler = sar.DistNeighborSampler(
        [4, 3, 2], input_node_features={"features": features}, output_node_features={"labels": labels}
    )
    dataloader = sar.DataLoader(full_graph_manager, train_nodes, neighbor_sampler, batch_size=5, shuffle=True)
    gnn_model = GNNModel("sage")
    optimizer = torch.optim.Adam(gnn_model.parameters(), lr=0.01)
    sar.sync_params(gnn_model)
    losses = []
    for _ in range(8):
        epoch, seeds = 0.0, []
        for blocks in dataloader:
            block_labels = blocks[-1].dstdata["labels"]
            loss = F.cross_entropy(gnn_model(blocks, blocks[0].srcdata["features"]), block_labels)
            optimizer.zero_grad()
            loss.backward()
            sar.gather_grads(gnn_model)
            optimizer.step()
            epoch += total(loss.detach()).item()
            seeds.append(blocks[-1].dstdata[dgl.NID])
        losses.append(epoch)
        assert torch.equal(torch.cat(seeds).sort().values, train_nodes)
    gnn_model.eval()
    with torch.no_grad():
        logits = gnn_model([full_graph_manager] * 3, features)
    ids = full_graph_manager.ndata["orig_id"]
    return {"losses": losses, "logits": logits, "ids": ids, "state": gnn_model.state_dict()}
