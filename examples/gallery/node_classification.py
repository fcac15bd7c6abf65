# %% [markdown]
# # Node classification on a graph that does not fit
#
# A GAT keeps several numbers per edge and head until backward is done. On a graph with many edges, that is what fills
# the memory, and not the graph. Here a process may take 300 MiB. Plain PyG fails within it, and two ranks train the
# same model within it.
#
# ## The graph
#
# Its degrees follow a power law, and communities share a class most of the time. It is partitioned once, before
# training.

# %%
import sys

import matplotlib.pyplot as plt
import numpy as np
import torch
import torch.nn.functional as F
from limited import spawn_limited  # beside this script; runs a function within a memory limit (Linux)
from torch_geometric.nn import GAT

import shardpass as sp
from shardpass.cli.graphs import powerlaw

nodes, limit = map(int, sys.argv[1:]) if len(sys.argv) > 1 else (12_000, 300)
torch.set_num_threads(1)
arrays = powerlaw(nodes)
print(sp.partition(arrays, "class-parts", parts=2, overwrite=True))
for name, array in arrays.items():
    np.save(f"class-{name}.npy", array)
del arrays


def make(channels, classes):
    torch.manual_seed(0)
    return GAT(channels, 64, num_layers=2, out_channels=classes, heads=8)


# %% [markdown]
# ## Plain PyG
#
# This is the loop that you know.


# %%
def plain(epochs=10):
    names = ("x", "y", "edge_index", "train_mask", "test_mask")
    x, y, edge_index, train, test = (torch.from_numpy(np.load(f"class-{name}.npy")) for name in names)
    edge_index = edge_index.long()
    model = make(x.size(1), 10)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(epochs):
        loss = F.cross_entropy(model(x, edge_index)[train], y[train])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        return losses, float((model(x, edge_index).argmax(1) == y)[test].float().mean())


# %% [markdown]
# ## shardpass
#
# The model is the same. What is new: `connect`, `load`, `wrap`, the graph in the place of `edge_index`, and losses and
# metrics over all ranks. A rank computes the messages of a few edges at a time, drops them, and
# computes them again in backward.


# %%
def sharded(epochs=10):
    comm = sp.connect()
    graph = sp.load("class-parts", comm)
    model = sp.pyg.wrap(make(graph.num_features, graph.num_classes), comm)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(epochs):
        loss = sp.cross_entropy(model(graph.x, graph), graph.y, graph.train_mask, comm)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        return losses, sp.accuracy(model(graph.x, graph), graph.y, graph.test_mask, comm)


# %% [markdown]
# ## Within the limit
#
# `spawn_limited` runs each rank in a process of its own, as torchrun would. The kernel refuses what goes beyond the
# limit. Beside the two runs stands a third, plain PyG without a limit.

# %%
((failed, failed_memory),) = spawn_limited(plain, 1, limit)
ranks = spawn_limited(sharded, 2, limit)
(((expected, expected_accuracy), plain_memory),) = spawn_limited(plain)
print(f"plain PyG within {limit} MiB: {failed!r}")
losses, accuracy = ranks[0][0]
peaks = [max(mib for _, mib in memory) for _, memory in ranks]
plain_peak = max(mib for _, mib in plain_memory)
gap = max(abs(a - b) for a, b in zip(losses, expected))
print(f"two ranks within {limit} MiB: peaks of {peaks[0]:.0f} and {peaks[1]:.0f} MiB, test accuracy {accuracy:.3f}")
print(f"plain PyG without a limit: a peak of {plain_peak:.0f} MiB, test accuracy {expected_accuracy:.3f}")
print(f"largest difference of the losses: {gap:.1e}")
assert isinstance(failed, MemoryError) and max(peaks) < limit and gap < 1e-4 and accuracy > 0.6

# %% [markdown]
# ## The picture
#
# Plain PyG without a limit climbs with each layer and falls in backward. The ranks stay low, since a rank holds few
# messages at once.

# %%
fig, ax = plt.subplots(figsize=(8, 3.4), layout="constrained")
for memory, label, style in (
    (plain_memory, "plain PyG, no limit", "-"),
    (failed_memory, "plain PyG, limited", "-"),
    (ranks[0][1], "shardpass, rank 0", "-"),
    (ranks[1][1], "shardpass, rank 1", "--"),
):
    seconds, mib = zip(*memory)
    kept = np.unique(np.linspace(0, len(mib) - 1, 300).astype(int))  # fewer points; a peak stays a peak
    highest = [max(mib[a : b + 1]) for a, b in zip(kept, [*kept[1:], len(mib) - 1])]
    ax.plot(np.array(seconds)[kept], highest, style, label=label)
ax.axhline(limit, color="black", linewidth=0.8, linestyle=":")
ax.text(0, limit, "limit", va="bottom")
ax.set(xlabel="seconds", ylabel="memory of the process, MiB", ylim=0)
fig.legend(loc="outside upper center", ncols=4)
title = "Memory over time: plain PyG passes the limit or fails at it, two ranks of shardpass stay below"
fig.savefig("node_classification.svg", metadata={"Title": title, "Date": None})

# %% [markdown]
# ## Largest size tested
#
# * GraphSAGE: 50 million nodes and a billion edges on four ranks of one machine with two cores, within 20 GiB. An epoch
#   took 264 s (`benchmarks/reports/scale-1000M-2026-11-23.md` in the repository).
# * GAT: 3 million edges on four ranks at 55 MiB each, where plain PyG needed 9,669 MiB
#   (`benchmarks/reports/memory-2026-11-22.md`).
