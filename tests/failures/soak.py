"""Training for very long as a script of one rank, for real launchers: ``python soak.py <what> <token>``.

STORE is the store, or the folder of DGL's parts for SAR's loader; STEPS is how many epochs or batches. At every tenth
of them each rank notes what it holds of the machine, and rank 0 prints all of that as JSON.
"""

import gc
import json
import os
import sys
import threading
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

import shardpass as sp  # noqa: E402

FRACTION = 10


def held():
    """What this process holds. Memory in KiB: all that is resident, and what no other process has."""
    gc.collect()
    lines = (line.split() for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    memory = {words[0].rstrip(":"): int(words[1]) for words in lines}
    shared = [path.stat().st_size for path in Path("/dev/shm").iterdir() if path.is_file()]
    return {
        "resident": memory["Rss"],
        "own": memory["Private_Clean"] + memory["Private_Dirty"],
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "python threads": threading.active_count(),
        "shared files": len(shared),
        "shared bytes": sum(shared),
    }


def epochs(comm, folder):
    """Epochs of a model with norms, dropout, attention and maxima; at times it is evaluated and saved."""
    from torch import nn
    from torch_geometric import nn as gnn

    class Net(nn.Module):
        def __init__(self, inside, outside):
            super().__init__()
            self.first, self.norm = gnn.GATConv(inside, 4, heads=2), nn.BatchNorm1d(8)
            self.second, self.drop = gnn.SAGEConv(8, 8, aggr=["mean", "max"]), nn.Dropout(0.2)
            self.third = gnn.GCNConv(8, outside)

        def forward(self, x, graph):
            x = self.drop(self.norm(self.first(x, graph)).relu())
            return self.third(self.second(x, graph).relu(), graph)

    graph = sp.load(folder, comm)
    model = sp.pyg.wrap(Net(graph.num_features, graph.num_classes), comm)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    for epoch in range(int(os.environ["STEPS"])):
        model.train()
        loss = sp.cross_entropy(model(graph.x, graph), graph.y, graph.train_mask, comm)
        optimizer.zero_grad()
        loss.backward()
        sp.sync_gradients(model, comm)
        optimizer.step()
        if epoch % 20 == 0:
            model.eval()
            with torch.no_grad():
                sp.accuracy(model(graph.x, graph), graph.y, graph.train_mask, comm)
            sp.save_checkpoint(Path(os.environ["OUT"], "soak.ckpt"), comm, model, optimizer, epoch=epoch, graph=graph)
        yield loss


def batches(comm, model, batches_of, loss_of):
    """Batches of a loader, in as many epochs as it takes."""
    optimizer, done = torch.optim.Adam(model.parameters(), lr=0.001), 0
    sp.sync_parameters(model, comm)
    while done < int(os.environ["STEPS"]):
        for batch in batches_of:
            loss = loss_of(batch)
            optimizer.zero_grad()
            loss.backward()
            sp.sync_gradients(model, comm)
            optimizer.step()
            done += 1
            yield loss


def neighbours(comm, folder):
    """Batches of PyG's neighbour loader."""
    from torch_geometric.nn import GraphSAGE

    graph = sp.load(folder, comm)
    model = GraphSAGE(graph.num_features, 8, 2, graph.num_classes)
    loader = sp.pyg.NeighborLoader(graph, [5, 3], graph.train_mask, batch_size=2, shuffle=True)

    def loss_of(batch):
        out = model(batch.x, batch.edge_index)[: batch.batch_size]
        return torch.nn.functional.cross_entropy(out, batch.y[: batch.batch_size], reduction="sum")

    return batches(comm, model, loader, loss_of)


def links(comm, folder):
    """Batches of PyG's loader of links, with negatives."""
    from torch_geometric.nn import GraphSAGE

    graph = sp.load(folder, comm)
    model = GraphSAGE(graph.num_features, 8, 2)
    loader = sp.pyg.LinkNeighborLoader(graph, [5, 3], neg_sampling="binary", batch_size=16, shuffle=True)

    def loss_of(batch):
        source, target = model(batch.x, batch.edge_index)[batch.edge_label_index]
        return torch.nn.functional.binary_cross_entropy_with_logits((source * target).sum(-1), batch.edge_label.float())

    return batches(comm, model, loader, loss_of)


class Blocks(torch.nn.Module):
    """Two layers of DGL on blocks."""

    def __init__(self, inside, outside):
        from dgl.nn import SAGEConv

        super().__init__()
        self.first, self.second = SAGEConv(inside, 8, "mean"), SAGEConv(8, outside, "mean")

    def forward(self, blocks, x):
        return self.second(blocks[1], self.first(blocks[0], x).relu())


def blocks(comm, folder):
    """Batches of DGL's loader."""
    import dgl

    graph = sp.load(folder, comm)
    model = Blocks(graph.num_features, graph.num_classes)
    sampler = dgl.dataloading.NeighborSampler([5, 3])
    loader = sp.dgl.DataLoader(graph, graph.train_mask, sampler, batch_size=2, shuffle=True)

    def loss_of(batch):
        _, _, found = batch
        out = model(found, found[0].srcdata["x"])
        return torch.nn.functional.cross_entropy(out, found[-1].dstdata["y"], reduction="sum")

    return batches(comm, model, loader, loss_of)


def sar_blocks(folder):
    """Batches of SAR's loader: ``(communicator, losses)``."""
    from frontends.sar_examples.data import of

    from shardpass.frontends import sar

    rank, size = int(os.environ["OMPI_COMM_WORLD_RANK"]), int(os.environ["OMPI_COMM_WORLD_SIZE"])
    address = sar.nfs_ip_init(rank, str(Path(os.environ["OUT"], "address")))
    sar.initialize_comms(rank, size, address, "mpi", torch.device("cpu"))
    part = sar.load_dgl_partition_data(str(Path(folder, "arxiv", "arxiv.json")), rank, torch.device("cpu"))
    features, labels = of(part, "features"), of(part, "labels")
    seeds = of(part, "train_mask").nonzero().view(-1) + part.node_ranges[rank][0]
    sampler = sar.DistNeighborSampler([5, 3], None, False, True, {"features": features}, {"labels": labels})
    graph = sar.construct_full_graph(part)
    loader = sar.DataLoader(graph, seeds, sampler, batch_size=3, shuffle=True)
    model = Blocks(features.size(1), 4).double()

    def loss_of(found):
        out = model(found, found[0].srcdata["features"])
        return torch.nn.functional.cross_entropy(out, found[-1].dstdata["labels"], reduction="sum")

    return graph.comm, batches(graph.comm, model, loader, loss_of)


WHAT = {"epochs": epochs, "neighbours": neighbours, "links": links, "blocks": blocks}


def main(what):
    torch.set_num_threads(1)
    folder, steps = os.environ["STORE"], int(os.environ["STEPS"])
    if what == "sar":
        comm, losses = sar_blocks(folder)
    else:
        comm = sp.connect()
        losses = WHAT[what](comm, folder)
    found = []
    for step, loss in enumerate(losses, start=1):
        assert torch.isfinite(loss)
        if step % (steps // FRACTION) == 0 and step <= steps:
            found.append(comm.all_gather_object(held(), "soak"))
    if comm.rank == 0:
        print("held:", json.dumps(found), flush=True)
    comm.barrier("the end")


if __name__ == "__main__":
    main(sys.argv[1])
