"""One configuration in processes of its own: the child that `benchmarks.run` starts, alone or under mpirun.

    python -m benchmarks.worker '{"graph": ..., "store": ..., "model": ..., "peer": null, ...}'

Rank 0 prints one JSON line.
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.nn import TransformerConv, models
from torch_geometric.nn.models.basic_gnn import BasicGNN

import shardpass as sp
from benchmarks.meter import Meter, resident
from shardpass.data import partition

Config = dict[str, Any]
HIDDEN = {"sage": 256, "gcn": 256, "gat": 128, "gin": 256, "transformer": 128}


class Transformer(BasicGNN):
    """Layers of TransformerConv with four heads, whose results stand side by side."""

    supports_edge_weight = supports_edge_attr = False

    def init_conv(self, in_channels: int, out_channels: int, **kwargs: Any) -> TransformerConv:
        """One layer."""
        return TransformerConv(in_channels, out_channels // 4, heads=4, **kwargs)


KINDS = {
    "sage": models.GraphSAGE, "gcn": models.GCN, "gat": models.GAT, "gin": models.GIN, "transformer": Transformer
}  # fmt: skip


def build_model(name: str, num_features: int, num_classes: int, hidden: int | None = None) -> nn.Module:
    """Three layers with BatchNorm: SAGE, GCN and GIN 256 wide; GAT 4 heads x 32, its last layer averaged over heads.

    Args:
        hidden: another width, of all heads together.
    """
    heads = {"heads": 4} if name == "gat" else {}
    width = hidden or HIDDEN[name]
    model: nn.Module = KINDS[name](num_features, width, 3, num_classes, norm="batch_norm", **heads)
    return model


def run_sharded(comm: sp.Communicator, config: Config) -> Config:
    """One rank of a shardpass run; figures of all ranks."""
    torch.set_num_threads(1)
    before = resident("RssAnon")
    graph, epoch = _prepare(comm, config)
    loaded = resident("RssAnon") - before
    if config.get("load_code", True):
        load_code(config)
    meter, losses, sent = Meter(comm), [], []
    comm.barrier()
    meter.start()
    for _ in range(config["epochs"]):
        before = comm.bytes_sent
        losses.append(epoch())
        sent.append(comm.bytes_sent - before)
        meter.epoch()
    ranks = comm.all_gather_object({**meter.result(), "loaded_bytes": loaded, "bytes_sent": sent[-1]}, "figures")
    halo_rows = sum(map(sum, graph.edge_index.plan.schedule.counts))
    counts = {"num_edges": graph.total_edges, "num_nodes": graph.total_nodes, "halo_rows": halo_rows}
    return {"losses": losses, "ranks": ranks, **counts}


def _prepare(comm: sp.Communicator, config: Config, check: bool = True) -> tuple[sp.ShardedGraph, Callable[[], float]]:
    """The graph in memory, and what trains a model on it for one epoch and returns the loss."""
    names = ("mode", "backward", "share_memory")
    options = sp.Options(**{name: config[name] for name in names if name in config})
    graph = _loaded(comm, config, options)
    x, y, mask = graph.x, graph.y.long(), graph.train_mask
    is_dgl = config.get("frontend") == "dgl"
    with sp.seed(0, comm):
        build = DGLModel if is_dgl else build_model
        model = build(config["model"], graph.num_features, graph.num_classes, config.get("hidden"))
    (sp.dgl if is_dgl else sp.pyg).wrap(model, comm, check=check, checkpoint=config.get("checkpoint"))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def epoch() -> float:
        logits = model(graph, x) if is_dgl else model(x, graph)
        loss = sp.cross_entropy(logits, y, mask, comm)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return graph, epoch


def _loaded(comm: sp.Communicator, config: Config, options: sp.Options) -> sp.ShardedGraph:
    if not config.get("in_memory"):
        return sp.load(config["store"], comm, options)
    with np.load(config["npz"]) as arrays:
        whole = {name: torch.from_numpy(arrays[name]) for name in ("edge_index", "x", "y", "train_mask")}
    graph: sp.ShardedGraph = sp.shard(whole, comm, options=options)
    return graph


def load_code(config: Config) -> None:
    """Train for an epoch on a ring of eight nodes in this process, so that all loops are compiled and loaded."""
    nodes = torch.arange(8)
    ring = {"edge_index": torch.stack([nodes, nodes.roll(1)]), "x": torch.randn(8, 8), "y": nodes % 2}
    with tempfile.TemporaryDirectory() as folder:
        store = f"{folder}/ring"
        partition({**ring, "train_mask": nodes < 6}, store, 1, "random")
        sp.spawn(_one_epoch, 1, args=({**config, "store": store, "in_memory": False},))
    gc.collect()


def _one_epoch(comm: sp.Communicator, config: Config) -> None:
    _prepare(comm, config, check=False)[1]()


def run_pyg(config: Config) -> Config:
    """The same training in plain PyG, on the whole graph in this process."""
    torch.set_num_threads(1)
    with np.load(config["npz"]) as arrays:
        x, y, mask = (torch.from_numpy(arrays[name]) for name in ("x", "y", "train_mask"))
        edge_index = torch.from_numpy(arrays["edge_index"]).long()
    y = y.long()
    torch.manual_seed(0)
    model = build_model(config["model"], x.size(1), int(y.max()) + 1)
    return _train(model, lambda: model(x, edge_index), y, mask, config, edge_index.size(1))


def _train(
    model: nn.Module,
    forward: Callable[[], torch.Tensor],
    y: torch.Tensor,
    mask: torch.Tensor,
    config: Config,
    num_edges: int,
) -> Config:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    meter, losses = Meter(), []
    meter.start()
    for _ in range(config["epochs"]):
        logits = forward()
        loss = F.cross_entropy(logits[mask], y[mask])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        del logits, loss
        meter.epoch()
    figures = {**meter.result(), "bytes_sent": 0}
    return {"losses": losses, "ranks": [figures], "num_edges": num_edges, "num_nodes": y.numel()}


class DGLModel(nn.Module):
    """The same layers in DGL's own code."""

    def __init__(self, name: str, num_features: int, num_classes: int, hidden: int | None = None) -> None:
        super().__init__()
        from dgl.nn import GATConv, SAGEConv

        self.heads = 4 if name == "gat" else 1
        hidden = hidden or HIDDEN[name]
        widths = [num_features, hidden, hidden, num_classes]
        self.convs, self.norms = nn.ModuleList(), nn.ModuleList([nn.BatchNorm1d(width) for width in widths[1:3]])
        for k in range(3):
            if name == "gat":
                out = widths[k + 1] // self.heads if k < 2 else num_classes
                self.convs.append(GATConv(widths[k], out, self.heads))
            else:
                self.convs.append(SAGEConv(widths[k], widths[k + 1], "mean"))

    def forward(self, graph: Any, x: torch.Tensor) -> torch.Tensor:
        for k, conv in enumerate(self.convs):
            x = conv(graph, x)
            if k < 2:
                x = F.relu(self.norms[k](x.flatten(1)))
        return x.mean(1) if self.heads > 1 else x


def run_dgl(config: Config) -> Config:
    """The same training in plain DGL, on the whole graph in this process."""
    import dgl

    torch.set_num_threads(1)
    with np.load(config["npz"]) as arrays:
        x, y, mask = (torch.from_numpy(arrays[name]) for name in ("x", "y", "train_mask"))
        src, dst = torch.from_numpy(arrays["edge_index"])
    y = y.long()
    graph = dgl.graph((src, dst), num_nodes=x.size(0))
    torch.manual_seed(0)
    model = DGLModel(config["model"], x.size(1), int(y.max()) + 1)
    return _train(model, lambda: model(graph, x), y, mask, config, src.numel())


def main(config: Config) -> None:
    """Run and print; under a launcher only rank 0 prints."""
    if config["peer"]:
        print(json.dumps({"pyg": run_pyg, "dgl": run_dgl}[config["peer"]](config)), flush=True)
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
