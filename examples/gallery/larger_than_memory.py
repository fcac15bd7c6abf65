# %% [markdown]
# # Larger than memory, on a laptop
#
# You have one machine, and neither the features nor what autograd keeps fit its memory. Then both can stay on the disk. Here a
# process may take 60 MiB for a graph with 62 MiB of features, and a GCN of six layers trains in it.
#
# ## The graph
#
# Each node has 1,024 numbers, as an embedding of a text has. A graph for one rank is stored as one part: its features are then
# mapped from the file, and nothing is copied.

# %%
import sys

import matplotlib.pyplot as plt
import torch
from limited import spawn_limited  # beside this script; runs a function within a memory limit (Linux)
from torch_geometric.nn import GCN

import shardpass as sp
from shardpass.cli.graphs import powerlaw

nodes, limit = map(int, sys.argv[1:]) if len(sys.argv) > 1 else (16_000, 60)
torch.set_num_threads(1)
print(sp.partition(powerlaw(nodes, degree=10, channels=1024), "laptop-parts", parts=1, overwrite=True))

# %% [markdown]
# ## Train
#
# The one new line is `with sp.offload(...)` around the forward pass. What autograd saves for backward goes to a file in that
# folder, and is read when backward comes to it. `GCNConv` takes its linear map before it sums, so only rows as wide as a layer
# are in memory.

# %%
def train(offload, in_memory, epochs=8):
    graph = sp.load("laptop-parts", sp.connect())
    x = graph.x.clone() if in_memory else graph.x
    torch.manual_seed(0)
    model = GCN(graph.num_features, 64, num_layers=6, out_channels=graph.num_classes, norm="batch_norm")
    sp.pyg.wrap(model, graph.comm)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(epochs):
        optimizer.zero_grad()
        if offload:
            with sp.offload("laptop-scratch", min_bytes=1 << 16, read_ahead=1):
                loss = sp.cross_entropy(model(x, graph), graph.y, graph.train_mask, graph.comm)
        else:
            loss = sp.cross_entropy(model(x, graph), graph.y, graph.train_mask, graph.comm)
        loss.backward()
        sp.sync_gradients(model, graph.comm)
        optimizer.step()
        losses.append(loss.item())
        del loss
    with torch.no_grad():
        return losses, sp.accuracy(model.eval()(x, graph), graph.y, graph.test_mask, graph.comm)

runs = {}
mapped = 4 * 1024 * nodes
for name, args in {"memory": (False, True), "mapped": (False, False), "offload": (True, False)}.items():
    ((result, memory),) = spawn_limited(lambda: train(*args))
    print(name, result, max(m for _, m in memory))
    ((result, memory),) = spawn_limited(lambda: train(*args), 1, limit, mapped)
    print(name, result, max(m for _, m in memory))
