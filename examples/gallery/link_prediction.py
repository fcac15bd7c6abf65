# %% [markdown]
# # Link prediction
#
# A model that predicts links scores pairs of nodes: who will follow whom, what will be bought together. This page
# trains PyG's usual encoder and decoder on the whole graph, with all of its links in every step.
#
# ## Links, and links held out
#
# A product graph is made up: products have one of 40 topics and noisy features, and most links are within a topic.
# PyG's `RandomLinkSplit` holds a tenth of the links out.

# %%
import sys

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch_geometric import seed_everything
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv
from torch_geometric.transforms import RandomLinkSplit
from torch_geometric.utils import coalesce, remove_self_loops, to_undirected

import shardpass as sp

nodes = int(sys.argv[1]) if len(sys.argv) > 1 else 3000
seed_everything(0)
topic = torch.arange(nodes) * 40 // nodes
src = torch.arange(nodes).repeat(6)
near = (src + (torch.randn(6 * nodes) * nodes / 160).long()).clamp(0, nodes - 1)
dst = torch.where(torch.rand(6 * nodes) < 0.85, near, torch.randint(nodes, near.shape))
order = torch.randperm(nodes)  # so that ids tell nothing
edge_index = to_undirected(remove_self_loops(coalesce(order[torch.stack([src, dst])]))[0])
x = torch.empty(nodes, 64)
x[order] = torch.randn(40, 64)[topic] + 2.5 * torch.randn(nodes, 64)

split = RandomLinkSplit(num_val=0, num_test=0.1, is_undirected=True, add_negative_train_samples=False)
train, _, test = split(Data(x=x, edge_index=edge_index))
positives = train.edge_label_index
print(f"{nodes:,} products, {positives.size(1):,} links to learn from, {test.edge_label.sum():.0f} held out")

# %% [markdown]
# ## The model
#
# This is the model of PyG's own example. `z[edge_label_index[0]]` reads rows of any node, and stays as it is.


# %%
class Net(torch.nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv1, self.conv2 = GCNConv(channels, 64), GCNConv(64, 32)

    def forward(self, x, edge_index, edge_label_index):
        z = self.conv2(self.conv1(x, edge_index).relu(), edge_index)
        return (z[edge_label_index[0]] * z[edge_label_index[1]]).sum(dim=-1)


# %% [markdown]
# ## Train on three ranks
#
# Each rank scores its own share of the pairs, whoever owns their ends. `sp.node_ids` says that these numbers are
# nodes of the whole graph.

# %%
sp.partition(Data(x=train.x, edge_index=train.edge_index), "link-parts", parts=3, overwrite=True)


def fit(comm, epochs=40):
    torch.set_num_threads(1)
    graph = sp.load("link-parts", comm)
    with sp.seed(0, comm):
        model = Net(64)
    sp.pyg.wrap(model, comm)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    share = slice(comm.rank, None, comm.size)
    mine, history = positives[:, share], []
    for epoch in range(epochs):
        negatives = sp.negative_sampling(graph, positives.size(1), seed=epoch)  # this rank's share of as many
        pairs = sp.node_ids(graph, torch.cat([mine, negatives], dim=1))
        labels = torch.cat([torch.ones(mine.size(1)), torch.zeros(negatives.size(1))])
        scores = model(graph.x, graph, pairs)
        loss = sp.mean(F.binary_cross_entropy_with_logits(scores, labels, reduction="none"), None, comm)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            scores = model(graph.x, graph, sp.node_ids(graph, test.edge_label_index[:, share]))
        metrics = (metric(scores, test.edge_label[share], None, comm) for metric in (sp.roc_auc, sp.average_precision))
        history.append((loss.item(), *metrics))
    return history, model.state_dict()


(history, weights), *_ = sp.spawn(fit, 3)
loss, area, precision = history[-1]
print(f"after {len(history)} epochs: loss {loss:.3f}, area {area:.3f}, average precision {precision:.3f}")

# %% [markdown]
# ## Take it away
#
# The weights fit the plain class. So here is the area again, in one process: PyG's model and scikit-learn's metric.

# %%
from sklearn.metrics import roc_auc_score, roc_curve  # noqa: E402

model = Net(64)
model.load_state_dict(weights)
with torch.no_grad():
    scores = model(train.x, train.edge_index, test.edge_label_index)
plain = roc_auc_score(test.edge_label, scores)
print(f"plain PyG and scikit-learn: {plain:.3f}, a difference of {abs(plain - area):.1e}")
assert abs(plain - area) < 1e-4 and area > 0.8

fig, axes = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
for column, name in ((1, "area under the ROC curve"), (2, "average precision")):
    axes[0].plot([row[column] for row in history], label=name)
axes[0].set(xlabel="epoch", ylabel="of the links held out", ylim=(0.5, 1))
axes[0].legend(loc="lower right")
wrong, right, _ = roc_curve(test.edge_label, scores)
axes[1].plot(wrong, right, label=f"area {area:.3f}")
axes[1].plot([0, 1], [0, 1], "--", label="chance")
axes[1].set(xlabel="non-links taken for links", ylabel="links found", aspect="equal")
axes[1].legend()
title = "Area under the ROC curve and average precision by epoch, and the ROC curve at the end"
fig.savefig("link_prediction.svg", metadata={"Title": title, "Date": None})

# %% [markdown]
# [Link prediction](../link-prediction.md) has more: rows of any nodes, autoencoders, several types.
#
# ## Largest size tested
#
# 30,000 products and 160,118 links, on the same three ranks: `python examples/gallery/link_prediction.py 30000`.
# The area was 0.892, in one process too.
