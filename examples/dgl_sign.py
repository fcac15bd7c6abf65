"""SIGN (Frasca et al., 2020): neighbourhood means are computed once, sharded; then an MLP trains on own rows alone.

python examples/dgl_sign.py
torchrun --nproc-per-node 2 examples/dgl_sign.py
"""

import dgl.function as fn
import torch

import shardpass as sp
from shardpass.cli.graphs import digits

HOPS = 3


def main():
    comm = sp.connect()
    if comm.rank == 0:
        sp.partition(digits(), "sign-parts", parts=2, overwrite=True)
    comm.barrier()
    graph = sp.load("sign-parts", comm)
    g = sp.dgl.graph(graph)
    hops = [graph.x]
    for _ in range(HOPS):
        g.ndata["h"] = hops[-1]
        g.update_all(fn.copy_u("h", "m"), fn.mean("m", "h"))
        hops.append(g.ndata["h"])
    x = torch.cat(hops, dim=1)
    with sp.seed(0, comm):
        widths = x.size(1), 64, graph.num_classes
        mlp = torch.nn.Sequential(torch.nn.Linear(*widths[:2]), torch.nn.ReLU(), torch.nn.Linear(*widths[1:]))
    sp.sync_parameters(mlp, comm)
    optimizer = torch.optim.Adam(mlp.parameters(), lr=0.01)
    for _ in range(60):
        loss = sp.cross_entropy(mlp(x), graph.y, graph.train_mask, comm)
        optimizer.zero_grad()
        loss.backward()
        sp.sync_gradients(mlp, comm)
        optimizer.step()
    accuracy = sp.accuracy(mlp(x), graph.y, graph.test_mask, comm)
    if comm.rank == 0:
        print(f"loss {loss.item():.4f}, test accuracy {accuracy:.4f} on {comm.size} rank(s)")


if __name__ == "__main__":
    main()
