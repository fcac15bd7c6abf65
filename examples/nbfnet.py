"""Neural Bellman-Ford Networks (Zhu et al., 2021): complete a graph of families, with every person as a candidate.

    python examples/nbfnet.py
    mpirun -n 3 python examples/nbfnet.py

A query is a person and a relation, and gives every node of the graph a state of its own in each layer. So there is
nothing to sample. A rank holds its nodes' states, ``[num_own, queries, width]``, and the edges that end in them.
"""

import torch
from torch import nn
from torch.nn.functional import softplus
from torch_geometric.data import Data
from torch_geometric.nn import MessagePassing

import shardpass as sp

RELATIONS = 5  # parent, spouse, grandparent, sibling, uncle or aunt; the inverse of relation r is r + RELATIONS


class BellmanFord(MessagePassing):
    """Makes all paths longer by one edge: the state of its source times a vector of its relation, by query."""

    def __init__(self, width):
        super().__init__(aggr="sum", node_dim=0)
        self.relations = nn.Linear(width, 2 * RELATIONS * width)
        self.combine = nn.Sequential(nn.Linear(2 * width, width), nn.LayerNorm(width), nn.ReLU())

    def forward(self, h, boundary, query, edge_index, edge_type):
        relations = self.relations(query).view(len(query), 2 * RELATIONS, -1).transpose(0, 1)
        paths = self.propagate(edge_index, h=h, edge_type=edge_type, relations=relations)
        return h + self.combine(torch.cat([h, paths + boundary], -1))

    def message(self, h_j, edge_type, relations):
        return h_j * relations[edge_type]


class NBFNet(nn.Module):
    def __init__(self, width=32, layers=3):
        super().__init__()
        self.queries = nn.Embedding(2 * RELATIONS, width)
        self.layers = nn.ModuleList(BellmanFord(width) for _ in range(layers))
        self.score = nn.Sequential(nn.Linear(2 * width, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, is_head, relation, edge_index, edge_type, kept):
        query, edge_index, edge_type = self.queries(relation), edge_index[:, kept], edge_type[kept]
        h = boundary = is_head[:, :, None] * query
        for layer in self.layers:
            h = layer(h, boundary, query, edge_index, edge_type)
        return self.score(torch.cat([h, query.expand_as(h)], -1)).squeeze(-1)


def families(size, generations=4):
    """A graph, and facts to train and to test, ``[3, num_facts]``: heads, relations and tails, also of the inverses.

    A fact is two edges, with its number. A fifth of the facts that follow from others are for the test.
    """
    people = size * generations
    parent, spouse = torch.zeros(2, people, people)
    for first in range(0, people, size):
        couples = first + torch.randperm(size).view(2, -1)  # people of a generation marry by lot
        spouse[couples[0], couples[1]] = spouse[couples[1], couples[0]] = 1
        if first + size < people:
            children = first + size + torch.arange(size)
            parent[children, couples[:, torch.randint(size // 2, (size,))]] = 1
    sibling = (parent @ parent.T).fill_diagonal_(0)
    relation, head, tail = torch.stack([parent, spouse, parent @ parent, sibling, parent @ sibling]).nonzero().T
    held_out = (relation > 1) & (torch.rand(len(relation)) < 0.2)
    there, back = torch.stack([head, relation, tail]), torch.stack([tail, relation + RELATIONS, head])
    train, test = (torch.cat([there[:, mask], back[:, mask]], 1) for mask in (~held_out, held_out))
    number = torch.arange(train.size(1)) % (train.size(1) // 2)
    return Data(edge_index=train[::2], edge_type=train[1], edge_fact=number, num_nodes=people), train, test


def known_tails(node_ids, queries, facts):
    """Which of the nodes some of the facts give as a tail of each query: ``[num_nodes, queries]``."""
    fact, query = ((facts[0, :, None] == queries[0]) & (facts[1, :, None] == queries[1])).nonzero().T
    count = queries.size(1)
    return torch.isin(node_ids[:, None] * count + torch.arange(count), facts[2, fact] * count + query)


def drawn_at(step, train, count=16):
    """The numbers of the facts to ask for, alike on every rank."""
    return torch.randperm(train.size(1), generator=torch.Generator().manual_seed(step))[:count]


def train_on(graph, model, train, steps):
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=0.01), []
    for step in range(steps):
        drawn = drawn_at(step, train)
        queries, kept = train[:, drawn], ~torch.isin(graph.edge_fact, drawn % (train.size(1) // 2))
        scores = model(graph.node_ids[:, None] == queries[0], queries[1], graph, graph.edge_type, kept)
        is_wrong = ~known_tails(graph.node_ids, queries, train)
        right, wrong = scores[graph.node_ids[:, None] == queries[2]], scores[is_wrong]
        loss = sp.mean(softplus(-right), None, graph.comm) + sp.mean(softplus(wrong), None, graph.comm)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def ranks_of(graph, model, facts, known):
    """Where the tail of each fact stands among all nodes but the other known tails; half of those that tie go first."""
    found, all_edges = [], torch.ones_like(graph.edge_type, dtype=torch.bool)
    for queries in facts.split(64, dim=1):
        scores = model(graph.node_ids[:, None] == queries[0], queries[1], graph, graph.edge_type, all_edges)
        tail = graph.comm.all_reduce((scores * (graph.node_ids[:, None] == queries[2])).sum(0))  # one rank owns it
        others = ~known_tails(graph.node_ids, queries, known)
        ahead = ((scores > tail) & others).sum(0) + ((scores == tail) & others).sum(0) / 2
        found.append(1 + graph.comm.all_reduce(ahead))
    return torch.cat(found)


def main():
    comm = sp.connect()
    with sp.seed(0, comm):
        data, train, test = families(60)
        model = NBFNet()
    graph, model = sp.shard(data, comm), sp.pyg.wrap(model, comm)
    losses = train_on(graph, model, train, 40)
    rank = ranks_of(graph, model, test, torch.cat([train, test], 1))
    if comm.rank == 0:
        quality = f"MRR {(1 / rank).mean():.3f}, hits at 10 {(rank <= 10).double().mean():.3f}"
        print(f"loss {losses[-1]:.4f}, {quality} of {len(rank)} facts, on {comm.size} rank(s)")


if __name__ == "__main__":
    main()
