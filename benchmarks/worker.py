"""One configuration in processes of its own: the child that `benchmarks.run` starts, alone or under mpirun.

    python -m benchmarks.worker '{"graph": ..., "store": ..., "model": ..., "peer": null, ...}'

Rank 0 prints one JSON line.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.nn import models

import shardpass as sp
from benchmarks.meter import Meter

Config = dict[str, Any]
HIDDEN = {"sage": 256, "gcn": 256, "gat": 128}


def build_model(name: str, num_features: int, num_classes: int) -> nn.Module:
    """Three layers with BatchNorm: SAGE and GCN 256 wide; GAT 4 heads x 32, its last layer averaged over heads."""
    kind = {"sage": models.GraphSAGE, "gcn": models.GCN, "gat": models.GAT}[name]
    heads = {"heads": 4} if name == "gat" else {}
    model: nn.Module = kind(num_features, HIDDEN[name], 3, num_classes, norm="batch_norm", **heads)
    return model


def run_sharded(comm: sp.Communicator, config: Config) -> Config:
    """One rank of a shardpass run; figures of all ranks."""
    torch.set_num_threads(1)
    graph = sp.load(config["store"], comm, sp.Options(mode=config["mode"]))
    x, y, mask = graph.x.clone(), graph.y.long().clone(), graph.train_mask.clone()
    with sp.seed(0, comm):
        model = build_model(config["model"], graph.num_features, graph.num_classes)
    sp.pyg.wrap(model, comm)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    meter, losses, sent = Meter(), [], []
    comm.barrier()
    meter.start()
    for _ in range(config["epochs"]):
        before = comm.bytes_sent
        logits = model(x, graph)
        loss = sp.cross_entropy(logits, y, mask, comm)
        optimizer.zero_grad()
        loss.backward()
        sp.sync_gradients(model, comm)
        optimizer.step()
        losses.append(float(loss.detach()))
        del logits, loss
        sent.append(comm.bytes_sent - before)
        meter.epoch()
    ranks = comm.all_gather_object({**meter.result(), "bytes_sent": sent[-1]}, "figures")
    return {"losses": losses, "ranks": ranks, "num_edges": graph.total_edges, "num_nodes": graph.total_nodes}


def run_pyg(config: Config) -> Config:
    """The same training in plain PyG, on the whole graph in this process."""
    torch.set_num_threads(1)
    with np.load(config["npz"]) as arrays:
        x, y, mask = (torch.from_numpy(arrays[name]) for name in ("x", "y", "train_mask"))
        edge_index = torch.from_numpy(arrays["edge_index"]).long()
    y = y.long()
    torch.manual_seed(0)
    model = build_model(config["model"], x.size(1), int(y.max()) + 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    meter, losses = Meter(), []
    meter.start()
    for _ in range(config["epochs"]):
        logits = model(x, edge_index)
        loss = F.cross_entropy(logits[mask], y[mask])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        del logits, loss
        meter.epoch()
    figures = {**meter.result(), "bytes_sent": 0}
    return {"losses": losses, "ranks": [figures], "num_edges": edge_index.size(1), "num_nodes": x.size(0)}


def main(config: Config) -> None:
    """Run and print; under a launcher only rank 0 prints."""
    if config["peer"] == "pyg":
        print(json.dumps(run_pyg(config)), flush=True)
    elif config["backend"] == "processes":
        print(json.dumps(sp.spawn(run_sharded, config["ranks"], "processes", args=(config,))[0]), flush=True)
    else:
        comm = sp.connect(ranks=config["ranks"])
        result = run_sharded(comm, config)
        if comm.rank == 0:
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    # Imported by its name, since spawned processes cannot find functions of a `__main__` that was started with -m.
    from benchmarks.worker import main as run

    run(json.loads(sys.argv[1]))
