"""Models as physicists write them: called with one dict, with parts that TorchScript has compiled."""

from functools import lru_cache, partial
from types import FunctionType

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import scatter


def mlp(channels: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(channels, 8), nn.SiLU(), nn.Linear(8, 8))


class Potential(nn.Module):
    """Energies of atoms from one dict, as MACE takes and returns them."""

    def __init__(self):
        super().__init__()
        self.embedding, self.radial, self.energy = nn.Linear(5, 8), mlp(1), nn.Linear(8, 1)

    def forward(self, data):
        h, (src, dst) = self.embedding(data["node_attrs"]), data["edge_index"]
        vectors = data["positions"][dst] - data["positions"][src] + data["shifts"]
        messages = self.radial(vectors.norm(dim=-1, keepdim=True)) * h[src]
        sums = torch.zeros_like(h).index_add_(0, dst, messages)
        return {"node_energy": self.energy((h + sums).tanh()).squeeze(-1), "node_feats": sums}


class Assigning(Potential):
    """Puts what it computes into the dict that it was given, and returns that, as NequIP does."""

    def forward(self, data):
        data.update(super().forward(data))
        data["node_attrs"] = data["node_attrs"] * data["node_energy"][:, None]
        return data


class Total(Potential):
    """With a readout over the dict's batch."""

    def forward(self, data):
        found = super().forward(data)
        found["total"] = torch.zeros(2).index_add_(0, data["batch"], found["node_energy"])
        return found


class Centred(Potential):
    def forward(self, data):
        found = super().forward(data)
        return {**found, "node_energy": found["node_energy"] - found["node_energy"].mean()}


class Passing(MessagePassing):
    """A layer that is called with the dict itself."""

    def __init__(self):
        super().__init__(aggr="add")
        self.embedding, self.weights = nn.Linear(5, 8), mlp(3)

    def forward(self, data):
        h = self.embedding(data["node_attrs"])
        return {"node_energy": self.propagate(data["edge_index"], h=h, shifts=data["shifts"]).sum(-1), "node_feats": h}

    def message(self, h_j, shifts):
        return h_j * self.weights(shifts)


class Parts(MessagePassing):
    """Applies `node` to rows of nodes, and `edge` to rows of edges inside of message."""

    def __init__(self, node, edge):
        super().__init__(aggr="add")
        self.embedding, self.node, self.edge = nn.Linear(5, 8), node, edge

    def forward(self, x, edge_index, shifts):
        h = self.embedding(x)
        return self.node(h + self.propagate(edge_index, h=h, shifts=shifts))

    def message(self, h_j, shifts):
        return self.edge(torch.cat([h_j, shifts], -1))


class Sizes(nn.Module):
    """Reads sizes to give rows their shape again, as the code that e3nn makes does."""

    def __init__(self):
        super().__init__()
        self.linear, self.scale = nn.Linear(8, 8), 2.0
        self.register_buffer("shift", torch.full((8,), 0.1))

    def forward(self, x):
        shape = x.shape[:-1]
        if x.dim() == 2:
            x = x * self.scale
        pairs = x.reshape(-1, 4)[:, :2]
        first, second = pairs.split(1, dim=-1)
        for _ in range(2):
            x = x + self.shift
        mixed = torch.einsum("zi,ij->zj", x, self.linear.weight)
        out = torch.cat([x[..., :3], mixed[:, 3:]], dim=-1).tanh() * x.new_ones(x.size(0), 8)
        products = (first * second).reshape(shape + (2,)).sum(-1, keepdim=True)  # noqa: RUF005
        return (self.linear(out).reshape(shape + (8,)) + products + x[:, None, 0]) / 8  # noqa: RUF005


class NoRows(nn.Module):
    def forward(self, x):
        if x.size(0) == 0:
            x = x * 2
        return x


class ByNumber(nn.Module):
    def forward(self, x):
        return x / x.size(0)


class ByLength(nn.Module):
    def forward(self, x):
        return x / len(x)


class Looped(nn.Module):
    def forward(self, x):
        total = 0
        for i in range(x.size(0)):
            total += i
        return x * total


class ByEntries(nn.Module):
    def forward(self, x):
        return x * (0.5 if x.numel() > 100 else 1.0)


class IfMany(nn.Module):
    def forward(self, x):
        if x.size(0) > 10:
            x = x * 2
        return x


class AtLeast(nn.Module):
    def forward(self, x):
        return x * max(x.size(0), 10)


class Halves(nn.Module):
    def forward(self, x):
        return torch.cat([x[: x.size(0) // 2] * 2, x[x.size(0) // 2 :]])


class OfFirst(nn.Module):
    def forward(self, x):
        return x + x[0]


class OfAll(nn.Module):
    def forward(self, x):
        return x - x.mean(0)


class ByValue(nn.Module):
    def forward(self, x):
        if bool(x.sum() > 0):
            x = x * 2
        return x


class InPython(nn.Module):
    def forward(self, x):
        return self.centred(x)

    @torch.jit.ignore
    def centred(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(0)


@torch.jit.script
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x.relu() * 2


@torch.jit.script
def shared_out(x: torch.Tensor) -> torch.Tensor:
    return x / x.size(0)


CALLS = 0


class AFunction(nn.Module):
    """Calls functions that are compiled: by its name, in a lambda, and one that it holds."""

    def __init__(self):
        super().__init__()
        self.act, self.scale = torch.jit.script(torch.nn.functional.silu), nn.Parameter(torch.ones(8))

    def forward(self, x):
        return self.act((lambda rows: doubled(rows * self.scale))(x))


class SharedOut(nn.Module):
    def forward(self, x):
        return shared_out(x)


class ByAHelper(nn.Module):
    def forward(self, x):
        return helper(x)


class Counting(nn.Module):
    def forward(self, x):
        global CALLS
        CALLS += 1
        return doubled(x)


def helper(x):
    return doubled(x)


class Scripted(MessagePassing):
    """A layer whose message calls a compiled function, and another in `update`."""

    def __init__(self):
        super().__init__(aggr="add")
        self.embedding, self.weights = nn.Linear(5, 8), nn.Linear(11, 8)

    def forward(self, x, edge_index, shifts):
        return self.propagate(edge_index, h=self.embedding(x), shifts=shifts)

    def message(self, h_j, shifts):
        return doubled(self.weights(torch.cat([h_j, shifts], -1)))

    def update(self, sums):
        return doubled(sums) + sums


class MeshLayer(MessagePassing):
    """A layer of MeshGraphNets whose `aggregate` returns the edges beside their sums, as in the course CS224W."""

    def __init__(self, end):
        super().__init__()
        self.edge, self.node, self.end = mlp(24), mlp(16), end

    def forward(self, x, edge_index, edge_attr):
        out, edges = self.propagate(edge_index, x=x, edge_attr=edge_attr)
        return x + self.node(torch.cat([x, out], 1)), edges

    def message(self, x_i, x_j, edge_attr):
        return self.edge(torch.cat([x_i, x_j, edge_attr], 1)) + edge_attr

    def aggregate(self, inputs, edge_index, dim_size=None):
        return scatter(inputs, edge_index[self.end], dim=0, dim_size=dim_size, reduce="sum"), inputs


class Mesh(nn.Module):
    def __init__(self, end):
        super().__init__()
        self.nodes, self.edges = mlp(5), mlp(3)
        self.layers = nn.ModuleList(MeshLayer(end) for _ in range(2))

    def forward(self, x, edge_index, shifts):
        x, edges = self.nodes(x), self.edges(shifts)
        for layer in self.layers:
            x, edges = layer(x, edge_index, edges)
        return x


class Checkpointed(nn.Module):
    """Recomputes `model` in backward, as Anemoi's processors do."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, *given):
        return checkpoint(self.model, *given, use_reentrant=False)


def _shapes(shape, heads, batch):
    rows, width = shape
    if rows % batch or width % heads:
        raise ValueError(shape)
    return (batch, rows // batch, heads, width // heads), (rows, width)


def rearranged(x, heads=2, batch=1):
    """Doubles the first of some heads, by shapes that are computed as einops does: again where there is no hash."""
    try:
        split, flat = lru_cache(_shapes)(tuple(x.shape), heads, batch)
    except TypeError:
        split, flat = _shapes(tuple(x.shape), heads, batch)
    parts = x.reshape(split)
    return torch.cat([parts[:, :, :1] * 2, parts[:, :, 1:]], 2).reshape(flat)


_of_einops = FunctionType(rearranged.__code__, {**globals(), "__name__": "einops.einops"}, "rearrange", (2, 1))


class Rearranged(nn.Module):
    """Calls `rearranged` as code of einops."""

    def __init__(self, **options):
        super().__init__()
        self.rearrange = partial(_of_einops, **options)

    def forward(self, x):
        return self.rearrange(x)


class CachesShapes(nn.Module):
    def forward(self, x):
        return rearranged(x)


class InHalves(Rearranged):
    """With half of the rows in each of two batches."""

    def __init__(self):
        super().__init__(batch=2)
