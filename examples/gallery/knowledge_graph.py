# %% [markdown]
# # A knowledge graph: R-GCN
#
# An R-GCN learns a vector for each entity of a knowledge graph, and a DistMult decoder scores facts that are not in it. This
# page completes a graph of people, companies and places: of which country is somebody a citizen?
#
# In such graphs the entities outgrow a memory first: each has a learned row, its gradient, and two rows of Adam's state. A
# table of all entities is therefore spread over the ranks.
#
# ## The facts
#
# The graph is made up, with rules behind it. Who was born in a city is a citizen of its country, nine times in ten. Companies
# are in cities, and most people work near where they live. Citizenships of every fifth person are held out.

# %%
import sys

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch_geometric.data import Data
from torch_geometric.nn import RGCNConv

import shardpass as sp

size = int(sys.argv[1]) if len(sys.argv) > 1 else 1
torch.manual_seed(0)
PEOPLE, COMPANIES, CITIES, COUNTRIES = 2000 * size, 200 * size, 100 * size, 20
first = torch.tensor([0, PEOPLE, COMPANIES, CITIES]).cumsum(0)  # the first id of each kind
people, entities = torch.arange(PEOPLE), int(first[3]) + COUNTRIES

country_of = torch.randint(COUNTRIES, (CITIES,))
born, lives = torch.randint(CITIES, (2, PEOPLE))
lives = torch.where(torch.rand(PEOPLE) < 0.5, born, lives)
citizen = torch.where(torch.rand(PEOPLE) < 0.9, country_of[born], torch.randint(COUNTRIES, (PEOPLE,)))
company_city = torch.randint(CITIES, (COMPANIES,))
near = torch.multinomial((company_city == torch.arange(CITIES)[:, None]).float() + 1e-3, PEOPLE, replacement=True)
works = near[lives, people]

facts = {
    "born in": (people, first[2] + born),
    "lives in": (people, first[2] + lives),
    "works at": (people, first[1] + works),
    "is in": (first[1] + torch.arange(COMPANIES), first[2] + company_city),
    "belongs to": (first[2] + torch.arange(CITIES), first[3] + country_of),
    "citizen of": (people, first[3] + citizen),
}
triples = torch.cat([torch.stack([s, torch.full_like(s, r), o]) for r, (s, o) in enumerate(facts.values())], dim=1)
CITIZEN = list(facts).index("citizen of")
held_out = (triples[1] == CITIZEN) & (triples[0] % 5 == 0)
train, test = triples[:, ~held_out], triples[:, held_out]
print(f"{entities:,} entities, {train.size(1):,} facts to learn from, {test.size(1)} held out")

# %% [markdown]
# ## The model
#
# `RGCNConv` and `DistMult` are those of PyG. The one change is the table: `sp.NodeEmbedding`, where one process has an
# `nn.Embedding`. Each rank has the rows of its own entities, and the same initial values on any number of ranks.
#
# `pairs` are entities by their ids in the whole graph, so `z[pairs]` is a row of any rank. That line stays as it was.

# %%
RELATIONS = len(facts)


class Completion(torch.nn.Module):
    def __init__(self, table, width=32):
        super().__init__()
        self.table = table
        self.conv1 = RGCNConv(width, width, 2 * RELATIONS, num_bases=8)
        self.conv2 = RGCNConv(width, width, 2 * RELATIONS, num_bases=8)
        self.relations = torch.nn.Parameter(torch.randn(RELATIONS, width) / 4)

    def embed(self, x, edge_index, edge_type):
        h = self.conv1(x, edge_index, edge_type).relu()
        return self.conv2(h, edge_index, edge_type)

    def forward(self, edge_index, edge_type, subjects, relations, objects):
        z = self.embed(self.table(), edge_index, edge_type)
        return (z[subjects] * self.relations[relations] * z[objects]).sum(dim=1)


# %% [markdown]
# ## Train
#
# Messages go both ways, so each relation gets an inverse. The ranks share the facts: each scores its own part of them, with as
# many wrong ones beside them. A wrong fact has another object, drawn from all entities.

# %%
src, dst = torch.cat([train[[0, 2]], train[[2, 0]]], dim=1)
edge_type = torch.cat([train[1], train[1] + RELATIONS])
data = Data(edge_index=torch.stack([src, dst]), edge_type=edge_type, num_nodes=entities)
sp.partition(data, "knowledge-parts", parts=2, overwrite=True)


def fit(comm, epochs):
    torch.set_num_threads(1)
    graph = sp.load("knowledge-parts", comm)
    with sp.seed(0, comm):
        model = Completion(sp.NodeEmbedding(graph, 32))
    sp.pyg.wrap(model, comm)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    generator, losses = torch.Generator().manual_seed(0), []
    for _ in range(epochs):
        wrong = torch.stack([train[0], train[1], torch.randint(entities, train[2].shape, generator=generator)])
        s, r, o = torch.cat([train, wrong], dim=1)[:, comm.rank :: comm.size]
        truth = torch.cat([torch.ones(train.size(1)), torch.zeros(train.size(1))])[comm.rank :: comm.size]
        scores = model(graph.edge_index, graph.edge_type, sp.node_ids(graph, s), r, sp.node_ids(graph, o))
        loss = sp.mean(F.binary_cross_entropy_with_logits(scores, truth, reduction="none"), None, comm)
        optimizer.zero_grad()
        loss.backward()
        sp.sync_gradients(model, comm)
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        z = sp.gather(graph, model.embed(model.table(), graph.edge_index, graph.edge_type))
    return losses, z, model.relations.detach()


import time; t=time.time(); t0=time.process_time()
(losses, z, relations), _ = sp.spawn(fit, 2, args=(int(sys.argv[2]),))
print(losses[::10], time.process_time()-t0, time.time()-t)
scores = (z[test[0]] * relations[CITIZEN]) @ z.T
true = scores.gather(1, test[2][:, None])
rank = 1 + (scores > true).sum(dim=1)
print(f"mean reciprocal rank {(1 / rank).mean():.3f}, hits at 1: {(rank == 1).float().mean():.1%}")
scores = (z[test[0]] * relations[CITIZEN]) @ z[int(first[3]):].T
print((scores.argmax(1)==test[2]-int(first[3])).float().mean())
