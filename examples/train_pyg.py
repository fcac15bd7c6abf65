"""Train an unmodified PyG GAT on the handwritten digits of scikit-learn, on one rank or on several.

    python examples/train_pyg.py
    mpirun -n 4 python examples/train_pyg.py
    torchrun --nproc-per-node 4 examples/train_pyg.py

What differs from a script for one process is marked with #.
"""

import os

import torch
from torch_geometric.nn import GAT

import shardpass as sp
from shardpass.cli.graphs import digits


def main():
    torch.set_num_threads(1)
    comm = sp.connect()  #
    folder = "out/digits-parts"
    if comm.rank == 0 and not os.path.exists(folder):
        os.makedirs("out", exist_ok=True)
        sp.partition(digits(), folder, parts=4)  # once, before training; usually from the command line
    comm.barrier()  #
    graph = sp.load(folder, comm)  #
    with sp.seed(0, comm):  #
        model = GAT(graph.num_features, 64, num_layers=2, out_channels=graph.num_classes, heads=8)
    sp.pyg.wrap(model, comm)  #
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(1, 41):
        model.train()
        logits = model(graph.x, graph)  # graph, where edge_index went
        loss = sp.cross_entropy(logits, graph.y, graph.train_mask, comm)  #
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if comm.rank == 0 and epoch % 10 == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")
    model.eval()
    with torch.no_grad():
        accuracy = sp.accuracy(model(graph.x, graph), graph.y, graph.test_mask, comm)  #
    if comm.rank == 0:
        print(f"test accuracy {accuracy:.4f} on {comm.size} rank(s)")


if __name__ == "__main__":
    main()
