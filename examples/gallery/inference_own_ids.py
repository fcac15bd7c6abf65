# %% [markdown]
# # Inference for all nodes, with your own ids
#
# Every night, all accounts of a bank are scored: which of them move money for fraudsters? Transfers and accounts come
# as Parquet tables, ids are strings, and the scores must leave the same way. Between the tables, the graph is
# sharded.
#
# ## The tables
#
# Here they are made up. Mule accounts are young, and mostly send money to each other.

# %%
import matplotlib.pyplot as plt
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from sklearn.metrics import roc_auc_score
from torch_geometric.nn import GraphSAGE

import shardpass as sp

rng = np.random.default_rng(0)
num = 4000
mule = rng.random(num) < 0.1
accounts = pa.table(
    {
        "account": [f"DE{i * 7919 % 10**6:06d}-{i % 97:02d}" for i in range(num)],
        "age": np.where(mule, rng.gamma(3, 0.5, num), rng.gamma(3, 1, num)).astype(np.float32),
        "balance": rng.normal(np.where(mule, -0.3, 0), 1).astype(np.float32),
        "fraud": pa.array(mule.astype(int), mask=rng.random(num) > 0.3),  # known for three accounts in ten
    }
)
src = rng.integers(0, num, 6 * num)
partner = rng.permutation(np.flatnonzero(mule))
dst = np.where(mule[src] & (rng.random(len(src)) < 0.5), rng.choice(partner, len(src)), rng.integers(0, num, len(src)))
ids = accounts["account"].to_numpy(zero_copy_only=False)
pq.write_table(accounts, "accounts.parquet")
pq.write_table(pa.table({"src": ids[src], "dst": ids[dst]}), "transfers.parquet")
print(num, "accounts, such as", accounts.slice(5, 1).to_pylist()[0])

# %% [markdown]
# ## From tables to parts
#
# `stream_tables` joins the tables in bounded memory, on disk where that is needed. It numbers the accounts as the
# rows of their table, and keeps the ids in the store. The columns that are left over are features.

# %%
tables = sp.data.stream_tables("transfers.parquet", "accounts.parquet", node_id="account", label="fraud")
print(sp.partition(tables, "bank-parts", parts=2, overwrite=True))

# %% [markdown]
# ## The model
#
# We train it on two ranks, on the accounts with a label: an unknown label is -1. The checkpoint has the names of the
# columns, with which those of another table are compared.


# %%
def make():
    return GraphSAGE(2, 32, num_layers=2, out_channels=2)


def train(comm, epochs=40):
    torch.set_num_threads(1)
    graph = sp.load("bank-parts", comm)
    with sp.seed(0, comm):
        model = make()
    sp.pyg.wrap(model, comm)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(epochs):
        loss = sp.cross_entropy(model(graph.x, graph), graph.y, graph.y >= 0, comm)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    sp.save_checkpoint("model.ckpt", comm, model, graph=graph)
    return loss.item(), model.state_dict()


loss, weights = sp.spawn(train, 2)[0]
print(f"loss {loss:.3f}")

# %% [markdown]
# ## Score every account
#
# `sp.infer` runs the model layer by layer, over all neighbours. It writes a table with your ids, since the name ends
# with `.parquet`. If the job is ended at night, the next one goes on after the last layer that was finished.


# %%
def score(comm):
    torch.set_num_threads(1)
    graph = sp.load("bank-parts", comm)
    model = sp.pyg.wrap(make(), comm)
    sp.load_checkpoint("model.ckpt", comm, model, graph=graph, other_graph=True)
    sp.infer(model, graph, "scores.parquet", overwrite=True)


sp.spawn(score, 2)
scores = pq.read_table("scores.parquet")
print(scores.num_rows, "rows:", scores.slice(0, 2).to_pylist())

# %% [markdown]
# ## Is it right?
#
# The ids are those of the accounts, in the same order. The numbers are those of plain PyG, for which you would have
# to number the accounts yourself.

# %%
assert scores["id"].to_pylist() == accounts["account"].to_pylist()
output = torch.tensor(scores["output"].to_pylist())
plain = make().eval()
plain.load_state_dict(weights)
x = torch.from_numpy(np.stack([accounts["age"], accounts["balance"]], 1))
with torch.no_grad():
    gap = float((plain(x, torch.from_numpy(np.stack([src, dst]))) - output).abs().max())
chance = output.softmax(1)[:, 1].numpy()
unknown = np.array(accounts["fraud"].is_null())
area = roc_auc_score(mule[unknown], chance[unknown])
print(f"largest difference from plain PyG: {gap:.1e}")
print(f"area under the ROC curve, accounts without a label: {area:.3f}")
assert gap < 1e-4 and area > 0.8

worst = ids[np.argsort(-chance)[:3]].tolist()
print(f"look first at {worst}, which are the nodes {sp.find_nodes('bank-parts', worst).tolist()}")

fig, ax = plt.subplots(figsize=(7, 3), layout="constrained")
bins = np.linspace(0, 1, 41)
ax.hist(chance[unknown & ~mule], bins, density=True, alpha=0.6, label="ordinary")
ax.hist(chance[unknown & mule], bins, density=True, alpha=0.6, label="mule")
ax.set(xlabel="score", ylabel="share of accounts", yticks=[])
ax.legend()
title = "Scores of accounts without a label: mules have higher ones than ordinary accounts"
fig.savefig("inference_own_ids.svg", metadata={"Title": title, "Date": None})

# %% [markdown]
# [Inference](../inference.md) and [Your own node ids](../names.md) tell the rest.
#
# ## Largest size tested
#
# * Tables with 10 million strings as ids and 20 million edges were partitioned within 1.4 GiB (`python -m
#   benchmarks.names`).
# * A GraphSAGE of three layers of 128 was run over 300,000 nodes and 3 million edges. Two ranks peaked at 151 MiB
#   each, and PyG's own layer-wise inference at 446 MiB (`python -m benchmarks.inference_peak`).
