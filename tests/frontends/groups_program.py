"""A training of one rank of a mesh of data x graph, and the same one in a single process."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.data import Data
from torch_geometric.nn import GATConv, SAGEConv

import shardpass as sp

STEPS = 4
NODES = (23, 17, 9, 14)
"""Of the graph of each data group."""


class Net(nn.Module):
    """A parameter in it gets no gradient on any rank."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = SAGEConv(3, 8, bias=False), nn.BatchNorm1d(8)
        self.second, self.unused = GATConv(8, 2, heads=2, concat=False), nn.Parameter(torch.ones(2))

    def forward(self, x, edge_index):
        return self.second(self.norm(self.first(x, edge_index)).relu(), edge_index)

    def encode(self, x, edge_index):
        return self.first(x, edge_index)


def build() -> Net:
    torch.manual_seed(3)
    return Net().double()


def graph(number: int) -> Data:
    """The graph of a data group: with self-loops, duplicate edges, and nodes without edges."""
    draw, nodes = torch.Generator().manual_seed(number), NODES[number]
    edges = torch.randint(nodes - 2, (2, 60), generator=draw)
    x = torch.randn(nodes, 3, generator=draw, dtype=torch.float64)
    return Data(edge_index=edges, x=x, y=torch.randint(2, (nodes,), generator=draw))


def optimizer_of(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(net.parameters(), lr=0.05)


def penalty(net: nn.Module) -> Tensor:
    """Of a parameter outside of the model, unless it is not here then."""
    bias = net.second.bias
    return torch.zeros(()) if hasattr(bias, "full_tensor") else 0.1 * bias.square().sum()


def alone(groups: int, how: str) -> list[list[float]]:
    """What a process that averages the losses of all groups has after each step: the loss, and all parameters."""
    net = build()
    optimizer, found = optimizer_of(net), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        outs = [(net(data.x, data.edge_index), data.y) for data in map(graph, range(groups))]
        loss = sum(nn.functional.cross_entropy(out, y) for out, y in outs) / groups
        loss += 0 if "resharding" in how else penalty(net)
        loss.backward()
        optimizer.step()
        found.append([loss.item(), *flat(net)])
    return found


def flat(net: nn.Module) -> list[float]:
    """All numbers of all parameters, those of other processes too. Collective where they are sharded."""
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in net.parameters()]
    return torch.cat([p.detach().flatten() for p in whole]).tolist()


class Groups:
    """One rank of a mesh ``shape`` of data x graph."""

    def __init__(self, *shape: int) -> None:
        self.shape = shape
        self.mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "graph"))
        self.comm = sp.connect(self.mesh["graph"])
        self.group = self.mesh["data"].get_group()
        self.graph = sp.shard(graph(self.mesh.get_local_rank("data")), self.comm)
        self.wrapped = sp.pyg.wrap(build(), self.comm)

    def averaging(self, how: str) -> nn.Module:
        """The wrapped model with what averages its gradients over the data groups."""
        if how.startswith("ddp"):
            return DistributedDataParallel(
                self.wrapped, process_group=self.group, find_unused_parameters=how == "ddp, finding unused"
            )
        if how.startswith("fsdp"):
            every = init_device_mesh("cpu", (self.mesh.size(),)) if how == "fsdp over all" else self.mesh["data"]
            fully_shard(self.wrapped, mesh=every, reshard_after_forward=how == "fsdp, resharding")
        return self.wrapped

    def train(self, how: str) -> list[list[float]]:
        """What `alone` returns, by this rank of the mesh."""
        net = self.averaging(how)
        self.trained = net, optimizer_of(net)
        found = []
        for _ in range(STEPS):
            loss = self.step(how == "by hand")
            found.append([loss, *flat(net)])
        return found

    def step(self, is_by_hand: bool = False) -> float:
        """The loss of one step, averaged over the data groups."""
        net, optimizer = self.trained
        optimizer.zero_grad()
        out = net(self.graph.x, self.graph)
        loss = sp.cross_entropy(out, self.graph.y, None, self.comm) + penalty(self.wrapped)
        loss.backward()
        if is_by_hand:
            for parameter in net.parameters():
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad, group=self.group)
                    parameter.grad /= self.shape[0]
        optimizer.step()
        total = torch.tensor(loss.item(), dtype=torch.float64)
        dist.all_reduce(total, group=self.group)
        return total.item() / self.shape[0]

    def save(self, path: str) -> None:
        model, optimizer = get_state_dict(*self.trained)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=path)

    def load(self, path: str, how: str) -> list[float]:
        """The numbers of the checkpoint, and the loss and numbers of one more step."""
        net = self.averaging(how)
        self.trained = net, optimizer_of(net)
        read(path, *self.trained)
        return flat(net)


def read(path: str, net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model, states = get_state_dict(net, optimizer)
    dcp.load({"model": model, "optimizer": states}, checkpoint_id=path)
    set_state_dict(net, optimizer, model_state_dict=model, optim_state_dict=states)


# ---- programs of one process


def trainings(world: sp.Communicator, cases: list[tuple[tuple[int, int], str]]) -> list[list[list[float]]]:
    return [Groups(*shape).train(how) for shape, how in cases]
