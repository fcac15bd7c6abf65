# %% [markdown]
# # Sampled training with an exact finish
#
# Mini-batches of sampled neighbours learn quickly: many small steps, each on a few nodes. Yet what they optimise is
# an estimate, and so is what they predict. This page trains on samples first, and then takes some steps on the whole
# graph. Both train the same parameters.
#
# ## The graph
#
# Its degrees follow a power law, and communities share a class most of the time. One node in ten has a label to learn
# from.

# %%
import sys

import matplotlib.pyplot as plt
import torch
from torch_geometric.nn import GraphSAGE

import shardpass as sp
from shardpass.cli.graphs import powerlaw

nodes = int(sys.argv[1]) if len(sys.argv) > 1 else 8000
print(sp.partition(powerlaw(nodes, channels=16), "sampled-parts", parts=2, overwrite=True))

# %% [markdown]
# ## Two models, one set of parameters
#
# `sp.pyg.exact` makes a copy of the model that runs on the whole graph and shares the parameters. The model itself
# stays an ordinary one, for batches.
#
# The loader is called as PyG's. All ranks draw its batches together, since a neighbour may be on any of them. A
# last loader predicts from samples, as is often done, to see what that costs.


# %%
def fit(comm, sampled=6, whole=30):
    torch.set_num_threads(1)
    graph = sp.load("sampled-parts", comm)
    with sp.seed(0, comm):
        model = GraphSAGE(graph.num_features, 64, num_layers=2, out_channels=graph.num_classes, dropout=0.5)
    exact = sp.pyg.exact(model, comm)
    loader = sp.pyg.NeighborLoader(graph, [3, 3], graph.train_mask, batch_size=128 // comm.size, shuffle=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    history = []

    def step(logits, y, mask):
        loss = sp.cross_entropy(logits, y, mask, comm)
        optimizer.zero_grad()
        loss.backward()
        sp.sync_gradients(model, comm)
        optimizer.step()

    def evaluate():
        exact.eval()
        with torch.no_grad():
            logits = exact(graph.x, graph)
        exact.train()
        history.append(sp.accuracy(logits, graph.y, graph.test_mask, comm))

    for _ in range(sampled):
        for batch in loader:
            logits = model(batch.x, batch.edge_index)[: batch.batch_size]
            step(logits, batch.y[: batch.batch_size], None)
        evaluate()
    model.eval()
    right = 0
    for batch in sp.pyg.NeighborLoader(graph, [3, 3], graph.test_mask, batch_size=1024):
        with torch.no_grad():
            logits = model(batch.x, batch.edge_index)[: batch.batch_size]
        right += int((logits.argmax(1) == batch.y[: batch.batch_size]).sum())
    estimate = sp.total(right, comm) / sp.total(int(graph.test_mask.sum()), comm)
    for _ in range(whole):
        step(exact(graph.x, graph), graph.y, graph.train_mask)
        evaluate()
    return history, estimate


(history, estimate), _ = sp.spawn(fit, 2)
(alone, _), _ = sp.spawn(fit, 2, args=(12, 0))
print(
    f"after 6 epochs on samples: {estimate:.3f} predicted from samples, {history[5]:.3f} predicted from all neighbours"
)
print(f"then 30 steps on the whole graph: {history[-1]:.3f}; then 6 more epochs on samples instead: {alone[-1]:.3f}")

# %% [markdown]
# ## What it brings
#
# The same parameters predict far better from all neighbours than from three of each node. So infer exactly, however
# you trained.
#
# The second line is the finish. Epochs on samples level off, since each step sees a few neighbours. Steps on the
# whole graph go on from there.

# %%
assert history[5] > estimate + 0.05 and history[-1] > alone[-1] + 0.02
steps = -(-int(0.1 * nodes) // 128)  # of an epoch
x = [steps * (epoch + 1) for epoch in range(12)]
fig, ax = plt.subplots(figsize=(7, 3.2), layout="constrained")
ax.plot(x, alone, "o--", label="samples only")
ax.plot([*x[:6], *range(x[5] + 1, x[5] + 31)], history, label="samples, then the whole graph")
ax.axvline(x[5], color="grey", linewidth=0.8)
ax.plot(x[5], estimate, "x", color="black", label="predicted from samples")
ax.set(xlabel="steps", ylabel="test accuracy")
ax.legend(loc="lower right")
title = "Test accuracy by step: samples alone level off, steps on the whole graph go on rising"
fig.savefig("sampled_training.svg", metadata={"Title": title, "Date": None})

# %% [markdown]
# [Sampling](../sampling.md) has more.
#
# ## Largest size tested
#
# A graph of 100,000 nodes and 3 million edges, with 15, 10 and 5 neighbours and 1,024 seeds a step on each of 4 ranks
# (`benchmarks/reports/sampling-2026-11-21.md` in the repository).
