"""Train PyG's GraphSAGE on sampled neighbourhoods of the handwritten digits, then infer exactly on the whole graph.

    python examples/sampling_pyg.py
    mpirun -n 4 python examples/sampling_pyg.py
    torchrun --nproc-per-node 4 examples/sampling_pyg.py

What differs from a script for one process is marked with #."""

import os

import torch
from torch_geometric.nn import GraphSAGE

import shardpass as sp
from shardpass.cli.graphs import digits


def main():
    torch.set_num_threads(1)
    comm = sp.connect()  #
    folder = "out/digits-parts"
    if comm.rank == 0 and not os.path.exists(folder):
        os.makedirs("out", exist_ok=True)
        sp.partition(digits(), folder, parts=4)
    comm.barrier()  #
    graph = sp.load(folder, comm)  #
    with sp.seed(0, comm):  #
        model = GraphSAGE(graph.num_features, 64, num_layers=2, out_channels=graph.num_classes)
    exact = sp.pyg.exact(model, comm)  # the same parameters, on the whole graph
    batch_size = 128 // comm.size  # so that steps are the same on any number of ranks
    loader = sp.pyg.NeighborLoader(graph, [5, 5], graph.train_mask, batch_size=batch_size, shuffle=True)  #
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(1, 11):
        for batch in loader:
            out = model(batch.x, batch.edge_index)[: batch.batch_size]
            loss = sp.cross_entropy(out, batch.y[: batch.batch_size], None, comm)  # the mean over all ranks' seeds
            optimizer.zero_grad()
            loss.backward()
            sp.sync_gradients(model, comm)  #
            optimizer.step()
        with torch.no_grad():
            accuracy = sp.accuracy(exact(graph.x, graph), graph.y, graph.test_mask, comm)  #
        if comm.rank == 0 and epoch % 5 == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}, test accuracy {accuracy:.4f} on {comm.size} rank(s)")


if __name__ == "__main__":
    main()
