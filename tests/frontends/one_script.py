"""A training script for plain PyG and for shardpass: ``one_script.py STORE OUT`` runs it on the ranks of a launcher.

`train` is the script. It is given a model, a teacher, the fields of a graph and two losses, and does not know whether
it has the whole graph or the share of a rank. What it logs and ends with goes to ``OUT.RANK``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR, ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch_geometric.data import Data
from torch_geometric.nn import GATConv, SAGEConv

import shardpass as sp

NODES, FEATURES, CLASSES, PARTS = 80, 6, 5, 4
STEPS, FROZEN, SPIKE = 6, (2, 3), 4
CLIP, TEMPERATURE, RADIUS = 0.3, 2.0, 0.05
Log = list[tuple[str, float]]


class Net(nn.Module):
    """Layers before a BatchNorm have no bias: its gradient is 0 plus rounding, which Adam would make large."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = GATConv(FEATURES, 4, heads=2, dropout=0.0, bias=False)
        self.means = SAGEConv(8, 8, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm1d(8), nn.BatchNorm1d(8)])
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor, edge_index: Any) -> Tensor:
        h = F.elu(self.norms[0](self.attention(x, edge_index)))
        h = F.dropout(h, 0.0, self.training)
        return self.head(self.norms[1](self.means(h, edge_index)).relu())


@dataclass
class Training:
    """What the loops share.

    Attributes:
        data: ``x``, ``edge_index``, ``y``, ``train_mask`` and ``more_mask``.
        cross_entropy: the loss of ``(out, y, mask)``.
        mean: of a value per node.
        no_sync: a block whose backward passes may leave gradients to the next one.
        sigmas: the learned weights of the two losses, logarithms of variances.
        log: names and numbers, in order.
    """

    model: nn.Module
    teacher: nn.Module
    data: Any
    cross_entropy: Callable[[Tensor, Tensor, Tensor], Tensor]
    mean: Callable[[Tensor], Tensor]
    no_sync: Callable[[], AbstractContextManager[None]]
    sigmas: nn.Parameter
    log: Log

    def out(self) -> Tensor:
        return self.model(self.data.x, self.data.edge_index)  # type: ignore[no-any-return]

    def taught(self) -> Tensor:
        """What the teacher says of each node."""
        with torch.no_grad():
            return F.softmax(self.teacher(self.data.x, self.data.edge_index) / TEMPERATURE, 1)

    def loss(self, mask: Tensor, target: Tensor) -> Tensor:
        """Labels and a teacher, weighted by how uncertain they are."""
        out = self.out()
        rows = F.kl_div(F.log_softmax(out / TEMPERATURE, 1), target, reduction="none").sum(1)
        losses = torch.stack([self.cross_entropy(out, self.data.y, mask), TEMPERATURE**2 * self.mean(rows)])
        return ((-self.sigmas).exp() * losses + self.sigmas).sum()

    def note(self, **numbers: Any) -> None:
        for name, number in sorted(numbers.items()):
            self.log.append((name, float(number.detach() if isinstance(number, Tensor) else number)))

    def note_gradient(self, name: str, parameter: Tensor) -> None:
        """A hook: the norm of a gradient as soon as it is there, and whole."""
        assert parameter.grad is not None
        self.last_norms[name] = float(parameter.grad.norm())

    def __post_init__(self) -> None:
        self.last_norms: dict[str, float] = {}
        for name, parameter in self.model.named_parameters():
            parameter.register_post_accumulate_grad_hook(partial(self.note_gradient, name))


def adam(t: Training) -> AveragedModel:
    """Groups of weight decay, accumulation, a scaler, clipping, an average, a schedule, a layer frozen and thawed."""
    matrices = [p for p in t.model.parameters() if p.dim() > 1]
    others = [p for p in t.model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": [*others, t.sigmas], "weight_decay": 0.0}]
    optimizer = AdamW(groups, lr=0.02)
    schedule = CosineAnnealingLR(optimizer, STEPS)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    average = AveragedModel(t.model, multi_avg_fn=get_ema_multi_avg_fn(0.8))
    for step in range(STEPS):
        t.model.attention.requires_grad_(step not in FROZEN)
        optimizer.zero_grad()
        target = t.taught()
        for mask, block in ((t.data.train_mask, t.no_sync()), (t.data.more_mask, nullcontext())):
            with block:
                loss = t.loss(mask, target) / 2
                scaler.scale(loss * 1e308 if step == SPIKE else loss).backward()
            t.note(loss=loss)
        scaler.unscale_(optimizer)
        t.note(norm=clip_grad_norm_([*t.model.parameters(), t.sigmas], CLIP), **t.last_norms)
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        average.update_parameters(t.model)
        t.note(scale=scaler.get_scale(), rate=schedule.get_last_lr()[0])
    return average


def sharpness_aware(t: Training) -> None:
    """Two passes for each step, the second at perturbed weights, and a rate that falls on a plateau."""
    parameters = [*t.model.parameters(), t.sigmas]
    optimizer = SGD(parameters, lr=0.1, momentum=0.9)
    schedule = ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.2)
    for _ in range(4):
        target = t.taught()
        optimizer.zero_grad()
        t.loss(t.data.train_mask, target).backward()
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        moves = [RADIUS * p.grad / norm for p in parameters]
        with torch.no_grad():
            torch._foreach_add_(parameters, moves)
        optimizer.zero_grad()
        loss = t.loss(t.data.train_mask, target)
        loss.backward()
        with torch.no_grad():
            torch._foreach_sub_(parameters, moves)
        optimizer.step()
        schedule.step(loss.detach())
        t.note(norm=norm, loss=loss, rate=optimizer.param_groups[0]["lr"], **t.last_norms)


def lbfgs(t: Training) -> None:
    """A closure with a penalty, called by a line search."""
    optimizer = torch.optim.LBFGS(t.model.parameters(), lr=0.5, max_iter=3, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = t.cross_entropy(t.out(), t.data.y, t.data.train_mask)
        loss = loss + 0.01 * sum(p.square().sum() for p in t.model.parameters())
        loss.backward()
        t.note(loss=loss)
        return loss

    for _ in range(2):
        t.note(first=optimizer.step(closure), **t.last_norms)


def train(
    model: nn.Module, teacher: nn.Module, data: Any, cross_entropy: Any, mean: Any, no_sync: Any = nullcontext
) -> tuple[Log, dict[str, Tensor]]:
    """The log, and all tensors of the model, of its average, and beside it."""
    teacher.eval().requires_grad_(False)
    sigmas = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    t = Training(model.train(), teacher, data, cross_entropy, mean, no_sync, sigmas, [])
    average = adam(t)
    sharpness_aware(t)
    lbfgs(t)
    for which in (model.eval(), average.eval()):
        with torch.no_grad():
            t.note(end=cross_entropy(which(data.x, data.edge_index), data.y, data.more_mask))
    ends = {**model.state_dict(), **{f"average {k}": v for k, v in average.state_dict().items()}, "sigmas": sigmas}
    return t.log, {name: tensor.detach().clone() for name, tensor in ends.items()}


def graph() -> Data:
    """Loops, edges twice, nodes without edges, and nodes to train on in the first parts alone."""
    draw = torch.Generator().manual_seed(0)
    edge_index = torch.randint(NODES - 4, (2, 5 * NODES), generator=draw)
    edge_index[:, :20], edge_index[1, 20:25] = edge_index[:, 20:40], edge_index[0, 20:25]
    nodes = torch.arange(NODES)
    return Data(
        x=torch.randn(NODES, FEATURES, generator=draw, dtype=torch.float64),
        edge_index=edge_index,
        y=torch.randint(CLASSES, (NODES,), generator=draw),
        train_mask=nodes < 30,
        more_mask=(nodes > 20) & (nodes % 3 > 0),
    )


def whole() -> tuple[Log, dict[str, Tensor]]:
    """The script with plain PyG, in one process."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, teacher = Net().double(), Net().double()
    return train(model, teacher, graph(), lambda out, y, mask: F.cross_entropy(out[mask], y[mask]), torch.mean)


def sharded(comm: Any, store: str) -> list[tuple[Log, dict[str, Tensor]]]:
    """The script with shardpass, on one rank: with gradients summed in each backward, and once for two."""
    data, found = sp.load(store, comm), []
    for waits in (False, True):
        with sp.seed(0, comm):
            model, teacher = Net().double(), Net().double()
        model, teacher = sp.pyg.wrap(model, comm), sp.pyg.wrap(teacher, comm)
        losses = partial(sp.cross_entropy, comm=comm), partial(sp.mean, mask=None, comm=comm)
        found.append(train(model, teacher, data, *losses, partial(sp.no_sync, model) if waits else nullcontext))
    return found


def main() -> None:
    store, out = sys.argv[1:]
    torch.set_num_threads(1)
    comm = sp.connect()
    torch.save(sharded(comm, store), Path(f"{out}.{comm.rank}"))


if __name__ == "__main__":
    main()
