# %% [markdown]
# # Moving from DGL or SAR
#
# DGL is no longer developed, and its models are still in use. This page takes a script of plain DGL, and runs it
# sharded. The model stays a DGL model, of DGL's own layers. It needs DGL 1.1.3 and Python below 3.12.
#
# ## Before
#
# A GAT on the handwritten digits of scikit-learn: 1,797 images, each linked to the ten that are nearest to it, and to
# itself.

# %%
import inspect
import sys
from difflib import unified_diff

import dgl
import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from dgl.nn import GATConv

import shardpass as sp
from shardpass.cli.graphs import digits, powerlaw

torch.set_num_threads(1)  # ranks are threads here
arrays = powerlaw(int(sys.argv[1])) if len(sys.argv) > 1 else digits()
arrays = {name: torch.as_tensor(array) for name, array in arrays.items()}
g = dgl.add_self_loop(dgl.graph(tuple(arrays.pop("edge_index").long()), num_nodes=len(arrays["x"])))
g.ndata.update(feat=arrays["x"], label=arrays["y"], train_mask=arrays["train_mask"], test_mask=arrays["test_mask"])


class GAT(torch.nn.Module):
    def __init__(self, channels, classes):
        super().__init__()
        self.first, self.second = GATConv(channels, 8, 8), GATConv(64, classes, 1)

    def forward(self, g, x):
        return self.second(g, self.first(g, x).flatten(1).relu()).mean(1)


def before(g):
    torch.manual_seed(0)
    model = GAT(64, 10)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(40):
        logits = model(g, g.ndata["feat"])
        loss = F.cross_entropy(logits[g.ndata["train_mask"]], g.ndata["label"][g.ndata["train_mask"]])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    mask = g.ndata["test_mask"]
    return losses, float((logits.argmax(1) == g.ndata["label"])[mask].float().mean())


losses, accuracy = before(g)
print(f"plain DGL: loss {losses[-1]:.4f}, test accuracy {accuracy:.4f}")

# %% [markdown]
# ## After
#
# `sp.partition` takes the `DGLGraph`, or the `.json` that `dgl.distributed.partition_graph` wrote. `sp.dgl.graph`
# gives each rank a graph with DGL's names, so the code around the model hardly changes.

# %%
sp.partition(g, "dgl-parts", parts=3, overwrite=True)


def after(comm):
    graph = sp.load("dgl-parts", comm)
    g = sp.dgl.graph(graph)
    with sp.seed(0, comm):
        model = GAT(64, 10)
    sp.dgl.wrap(model, comm)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(40):
        logits = model(g, g.ndata["feat"])
        loss = sp.cross_entropy(logits, g.ndata["label"], g.ndata["train_mask"], comm)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, sp.accuracy(logits, g.ndata["label"], g.ndata["test_mask"], comm)


sharded_losses, sharded_accuracy = sp.spawn(after, 3)[0]
print(f"three ranks: loss {sharded_losses[-1]:.4f}, test accuracy {sharded_accuracy:.4f}")

# %% [markdown]
# ## What has changed
#
# This is the difference of the two functions:

# %%
old, new = (inspect.getsource(function).splitlines() for function in (before, after))
print("\n".join(line for line in unified_diff(old, new, n=0, lineterm="") if line[:2] not in ("--", "++", "@@")))

# %% [markdown]
# Each of these lines is there for a reason:
#
# * `sp.load` and `sp.dgl.graph` give a rank its own nodes, and the edges that end in them.
# * `sp.seed` starts all ranks from the same weights. `sp.dgl.wrap` sends those of rank 0 to all.
# * `sp.cross_entropy` and `sp.accuracy` are over the nodes of all ranks, and so every rank has the same number.
#
# Without `sp.spawn`, call `after(sp.connect())` and start the script by torchrun, mpirun or srun. See
# [Launching](../launching.md).
#
# ## Is it the same?
#
# Yes. What is left is the rounding of float32, which training amplifies from epoch to epoch.

# %%
gaps = [abs(a - b) for a, b in zip(losses, sharded_losses)]
print(f"largest difference of the losses: {max(gaps[:10]):.1e} in the first ten epochs, {max(gaps):.1e} in all")
assert max(gaps[:10]) < 1e-4 and abs(accuracy - sharded_accuracy) < 0.01

fig, ax = plt.subplots(figsize=(7, 3), layout="constrained")
ax.plot(losses, linewidth=4, alpha=0.4, label="plain DGL")
ax.plot(sharded_losses, label="shardpass, three ranks")
ax.set(xlabel="epoch", ylabel="loss", ylim=0)
ax.legend()
title = "The losses of plain DGL and of three ranks lie on each other"
fig.savefig("moving_from_dgl.svg", metadata={"Title": title, "Date": None})

# %% [markdown]
# ## From SAR
#
# A script that was written for SAR runs after one change: `from shardpass.frontends import sar` in the place of
# `import sar`. Partitions, command lines and launchers stay as they are. [Migrating from
# SAR](../migrating-from-sar.md) has a whole script, and the names without SAR.
#
# ## Largest size tested
#
# A GAT of DGL's layers on 30,000 nodes and 613,140 edges, on three ranks: test accuracy 0.896, as with plain DGL
# (`python examples/gallery/moving_from_dgl.py 30000`).
#
# The kernels are those of PyG's `GATConv`, which trained on 3 million edges at 55 MiB a rank
# (`benchmarks/reports/memory-2026-11-22.md` in the repository). [DGL](../dgl.md) has more: sampled blocks, several
# types, readouts, and what is refused.
