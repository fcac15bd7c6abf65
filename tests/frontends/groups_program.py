"""A training of one rank of a mesh of data x graph, and the same one in a single process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
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


def average(net: nn.Module, group: Any, size: int) -> None:
    for parameter in net.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad, group=group)
            parameter.grad /= size


def flat(net: nn.Module) -> list[float]:
    """All numbers of all parameters, those of other processes too. Collective where they are sharded."""
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in net.parameters()]
    return torch.cat([p.detach().flatten() for p in whole]).tolist()


def with_states(net: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """All numbers of all parameters, and of what Adam keeps of them. Collective where they are sharded."""
    kept = [optimizer.state[p][name] for p in net.parameters() for name in ("exp_avg", "exp_avg_sq", "step")]
    whole = [t.full_tensor() if hasattr(t, "full_tensor") else t for t in kept]
    assert all(t.any() for t in whole), "Adam has taken steps"
    return [*flat(net), *torch.cat([t.detach().double().flatten() for t in whole]).tolist()]


class Groups:
    """One rank of a mesh ``shape`` of data x graph."""

    def __init__(self, *shape: int, net: nn.Module | None = None) -> None:
        self.shape = shape
        self.mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "graph"))
        self.comm = sp.connect(self.mesh["graph"])
        self.group = self.mesh["data"].get_group()
        self.graph = sp.shard(graph(self.mesh.get_local_rank("data")), self.comm)
        self.wrapped = sp.pyg.wrap(build() if net is None else net, self.comm)

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
            average(net, self.group, self.shape[0])
        optimizer.step()
        total = torch.tensor(loss.item(), dtype=torch.float64)
        dist.all_reduce(total, group=self.group)
        return total.item() / self.shape[0]

    def save(self, path: str) -> None:
        model, optimizer = get_state_dict(*self.trained)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=path)

    def load(self, path: str, how: str) -> list[float]:
        """What `with_states` gives after it was read."""
        net = self.averaging(how)
        self.trained = net, optimizer_of(net)
        read(path, *self.trained)
        return with_states(*self.trained)


def read(path: str, net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model, states = get_state_dict(net, optimizer)
    dcp.load({"model": model, "optimizer": states}, checkpoint_id=path)
    set_state_dict(net, optimizer, model_state_dict=model, optim_state_dict=states)


# ---- programs of one process


def trainings(world: sp.Communicator, cases: list[tuple[tuple[int, int], str]]) -> list[list[list[float]]]:
    return [Groups(*shape).train(how) for shape, how in cases]


def all_used() -> Net:
    """A model whose optimizer has states of all its parameters."""
    net = build()
    del net.unused
    return net


def checkpoints(world: sp.Communicator, folder: str) -> list[list[float]]:
    """What 2 x 2 trained and saved, and what 4 x 1 read of it, for each way."""
    found = []
    for how in ("fsdp", "ddp"):
        saved = Groups(2, 2, net=all_used())
        saved.train(how)
        found.append(with_states(*saved.trained))
        saved.save(f"{folder}/{how}")
        found += [Groups(4, 1, net=all_used()).load(f"{folder}/{how}", other) for other in ("fsdp", "ddp")]
    return found


def accumulated(groups: Groups, how: str, waits: Callable[[nn.Module, bool], AbstractContextManager[Any]]) -> float:
    """By how much the gradients of two backward passes differ from twice those of one."""
    net = groups.averaging(how)
    once, twice = [], []
    for sizes, passes in ((once, 1), (twice, 2)):
        net.zero_grad()
        for number in range(passes):
            with waits(net, number == passes - 1):
                out = net(groups.graph.x, groups.graph)
                sp.cross_entropy(out, groups.graph.y, None, groups.comm).backward()
        sizes += [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad.clone() for p in net.parameters()]
    return max(float((two - 2 * one).abs().max()) for one, two in zip(once, twice))


def of_torch(net: nn.Module, is_last: bool) -> AbstractContextManager[Any]:
    if isinstance(net, DistributedDataParallel):
        return nullcontext() if is_last else net.no_sync()
    net.set_requires_gradient_sync(is_last)
    return nullcontext()


def of_ours(net: nn.Module, is_last: bool) -> AbstractContextManager[Any]:
    return nullcontext() if is_last else sp.no_sync(net.module if isinstance(net, DistributedDataParallel) else net)


def accumulations(world: sp.Communicator) -> list[float]:
    ways = [("ddp", of_torch), ("ddp", of_ours), ("fsdp", of_torch)]
    return [accumulated(Groups(2, 2, net=all_used()), *way) for way in ways]


def by_parts(world: sp.Communicator) -> list[list[float]]:
    """The clipped gradients of a method besides ``forward`` and of ``forward``, by each way of averaging them."""
    found = []
    for how in ("by hand", "fsdp", "fsdp, resharding"):
        groups = Groups(2, 2)
        net = groups.averaging(how)
        if how != "by hand":
            register_fsdp_forward_method(net, "encode")
        sp.mean(net.encode(groups.graph.x, groups.graph).square().mean(1), None, groups.comm).backward()
        sp.cross_entropy(net(groups.graph.x, groups.graph), groups.graph.y, None, groups.comm).backward()
        if how == "by hand":
            average(net, groups.group, 2)
        norm = sp.clip_grad_norm(net, 0.1, groups.comm)
        whole = [
            g.full_tensor() if hasattr(g, "full_tensor") else g for p in net.parameters() if (g := p.grad) is not None
        ]
        found.append([norm.item(), *torch.cat([gradient.flatten() for gradient in whole]).tolist()])
    return found


def refusals(world: sp.Communicator) -> list[str]:
    """What each misuse says on this rank."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "graph"))
    comm = sp.connect(mesh["graph"])
    shares = sp.shard(graph(0), comm)

    def over_all():
        return DistributedDataParallel(sp.pyg.wrap(build(), comm))(shares.x, shares)

    def sharded(method="forward", x=shares.x, of=lambda net: net):
        net = sp.pyg.wrap(build(), comm)
        fully_shard(of(net), mesh=mesh["data"])
        return getattr(net, "__call__" if method == "forward" else method)(x, shares)

    def waiting():
        net = sp.pyg.wrap(build(), comm)
        fully_shard(net, mesh=mesh["data"])
        with sp.no_sync(net):
            pass

    def after(call):
        net = sp.pyg.wrap(build(), comm)
        fully_shard(net, mesh=mesh["data"])
        call(net)

    def sharded_rows():
        net = sp.pyg.wrap(nn.Sequential(sp.NodeEmbedding(shares, 2), nn.Linear(2, 2)), comm)
        fully_shard(net, mesh=mesh["data"])
        net()

    misuses = [
        over_all,
        lambda: sharded("encode"),
        lambda: sharded(of=lambda net: net.first),
        lambda: sharded(x=shares.x.clone().requires_grad_()),
        waiting,
        sharded_rows,
        lambda: after(lambda net: sp.sync_parameters(net, comm)),
        lambda: after(lambda net: sp.save_checkpoint("never written", comm, net)),
        lambda: sp.sync_gradients(fully_shard(build(), mesh=mesh["data"]), comm),
        lambda: sp.pyg.wrap(DistributedDataParallel(build(), process_group=mesh["data"].get_group()), comm),
        lambda: sp.pyg.wrap(fully_shard(build(), mesh=mesh["data"]), comm),
        lambda: sp.connect(mesh),
        lambda: sp.connect(mesh["graph"], group=mesh["data"].get_group()),
        lambda: sp.connect(mesh["graph"].get_group()),
        lambda: sp.connect(DeviceMesh("cpu", [0, 1])),
    ]
    return [told(misuse) for misuse in misuses]


def told(misuse: Callable[[], Any]) -> str:
    try:
        misuse()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"
