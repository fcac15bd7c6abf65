# %% [markdown]
# # Larger than memory, on a laptop
#
# You have one machine, and neither the features nor what autograd keeps fit its memory. Then both can stay on the
# disk. Here a process may take 36 MiB for a graph with 39 MiB of features, and a GCN of six layers trains in it.
#
# ## The graph
#
# Each node has 1,024 numbers, as an embedding of a text has. A graph for one rank is stored as one part: its features
# are then mapped from the file, and nothing is copied.

# %%
import sys
from contextlib import nullcontext

import matplotlib.pyplot as plt
import numpy as np
import torch
import torch.nn.functional as F
from limited import spawn_limited  # beside this script; runs a function within a memory limit (Linux)
from torch_geometric.nn import GCN

import shardpass as sp
from shardpass.cli.graphs import powerlaw

nodes, limit = map(int, sys.argv[1:]) if len(sys.argv) > 1 else (10_000, 36)
torch.set_num_threads(1)
arrays = powerlaw(nodes, degree=10, channels=1024)
print(sp.partition(arrays, "laptop-parts", parts=1, overwrite=True))
for name in ("x", "y", "train_mask", "edge_index"):
    np.save(f"laptop-{name}.npy", arrays.pop(name))

# %% [markdown]
# ## Train
#
# The one new line is `with sp.offload(...)` around the forward pass. What autograd saves for backward goes to a file
# in that folder, and is read when backward comes to it. `GCNConv` takes its linear map before it sums, so only rows
# as wide as a layer are in memory.


# %%
def make(channels, classes):
    torch.manual_seed(0)
    return GCN(channels, 128, num_layers=6, out_channels=classes, norm="batch_norm")


def train(offload, in_memory=False, epochs=4):
    comm = sp.connect()  # one process, one rank
    graph = sp.load("laptop-parts", comm)
    x = graph.x.clone() if in_memory else graph.x
    model = sp.pyg.wrap(make(graph.num_features, graph.num_classes), comm)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(epochs):
        optimizer.zero_grad()
        with sp.offload("laptop-scratch", min_bytes=1 << 16, read_ahead=1) if offload else nullcontext():
            loss = sp.cross_entropy(model(x, graph), graph.y, graph.train_mask, comm)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        del loss
    return losses


def plain(epochs=4):
    names = ("x", "y", "train_mask", "edge_index")
    x, y, train, edge_index = (torch.from_numpy(np.load(f"laptop-{name}.npy")) for name in names)
    edge_index = edge_index.long()
    model, losses = make(1024, 10), []
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(epochs):
        loss = F.cross_entropy(model(x, edge_index)[train], y[train])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# %% [markdown]
# ## With and without a limit
#
# Each way to train runs twice, in a process of its own: without a limit, and within it. The kernel enforces the
# limit. It counts what the process may write to, so the mapped file is added to it.

# %%
ways = {
    "plain PyG": plain,
    "shardpass, features in memory": lambda: train(offload=False, in_memory=True),
    "shardpass, features mapped": lambda: train(offload=False),
    "shardpass, mapped and offloaded": lambda: train(offload=True),
}
peaks, fits, losses = {}, {}, {}
for name, way in ways.items():
    ((losses[name], memory),) = spawn_limited(way)
    ((limited, _),) = spawn_limited(way, 1, limit, mapped=0 if way is plain else 4 * 1024 * nodes)
    peaks[name], fits[name] = max(mib for _, mib in memory), not isinstance(limited, MemoryError)
    print(f"{name}: a peak of {peaks[name]:.0f} MiB; within {limit} MiB: {'trains' if fits[name] else 'out of memory'}")
first, *others = losses.values()
gap = max(abs(a - b) for other in others for a, b in zip(first, other))
print(f"largest difference of the losses of the four: {gap:.1e}")
assert list(fits.values()) == [False, False, False, True] and gap < 1e-3

# %%
fig, ax = plt.subplots(figsize=(8, 2.6), layout="constrained")
bars = ax.barh(list(peaks), list(peaks.values()), color=["tab:green" if fit else "tab:grey" for fit in fits.values()])
ax.bar_label(bars, [f" {peak:.0f} MiB" for peak in peaks.values()])
ax.axvline(limit, color="black", linewidth=0.8, linestyle=":")
ax.text(limit, -0.75, " limit")
ax.set(xlabel="peak without a limit, MiB", xlim=(0, 1.15 * max(peaks.values())))
ax.invert_yaxis()
title = "Peak memory of four ways to train; only features mapped and tensors offloaded fit the limit"
fig.savefig("larger_than_memory.svg", metadata={"Title": title, "Date": None})

# %% [markdown]
# The time is what you would expect: what is offloaded must be written and read again. A report measures it beside the
# peaks (`benchmarks/reports/out-of-core-2026-11-22.md` in the repository): 0.70 CPU seconds an epoch with offloading,
# and 0.55 with all in memory.
#
# [Larger than memory](../larger-than-memory.md) says what stays in memory all the same, and what to watch.
#
# ## Largest size tested
#
# 16,000 nodes with 1,024 features in float64 (125 MiB), 161,268 edges, six layers of 32, within 72 MiB: the same
# report. `sp.offload` has been tried neither on graphs of millions of nodes nor on a GPU.
