"""One rank's programs: models on a device, a GPU or the fake one, against the whole graph on the CPU."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch_geometric.data import Data
from torch_geometric.nn import GATConv, SAGEConv

import shardpass as sp
from shardpass.backends.torch_distributed import TorchCommunicator
from shardpass.core.ranks import Ranks
from shardpass.testing import cotangent, evaluate_whole

from . import fake_device as fake
from .pyg_cases import GRAPH, LAYERS, MODELS

ALLOWED = "device_program.py", "core/training/gradients.py"  # three numbers of each parameter
FEW = 20
"""Numbers that a step may copy: samples of the check, bounds of chunks, moments of a norm. Rows have more."""
CASES = {**LAYERS, **MODELS}
SOME = (
    "GCNConv weighted",
    "SAGEConv max",
    "GATConv edges",
    "TransformerConv",
    "EdgeCNN with BatchNorm",
)


def whole_graph() -> Data:
    """The graph of the cases, to be partitioned."""
    return Data(edge_index=GRAPH.edge_index, num_nodes=GRAPH.num_nodes, **GRAPH.node, **GRAPH.edge)


def on_the_device(kind: str) -> Ranks:
    """Ranks whose tensors are on the device. On the fake one, tensors travel between devices."""
    if kind == fake.NAME:
        fake.register()
        device = torch.device(fake.NAME, 0)
        return Ranks(TorchCommunicator.from_group(device=device, direct=f"cpu:gloo,{fake.NAME}:gloo"))
    return Ranks(TorchCommunicator.from_group(device=torch.device(kind, 0)))


def compare(comm: Any, kind: str, store: str, mode: str, names: Sequence[str]) -> tuple[dict[str, float], list[str]]:
    """The largest error of each case, and the copies with rows that a second step made over the host."""
    ranks = on_the_device(kind)
    graph = sp.load(store, ranks, sp.Options(mode=mode))
    errors: dict[str, float] = {}
    copies: set[str] = set()
    for name, (make, call) in ((name, CASES[name]) for name in names):
        torch.manual_seed(1)
        model = make().double()
        whole = evaluate_whole(model, GRAPH, call)
        mine = sp.pyg.wrap(copy.deepcopy(model).to(ranks.device), ranks)
        for step in range(2):
            fake.CROSSINGS.clear()
            mine.zero_grad()
            fields = {field: getattr(graph, field).detach().clone() for field in (*GRAPH.node, *GRAPH.edge)}
            inputs = {field: t.requires_grad_() for field, t in fields.items() if t.is_floating_point()}
            out = call(mine, fields, graph)
            ids = graph.node_ids if out.size(0) == graph.num_own_nodes else graph.edge_ids
            weight = cotangent(whole.output)[ids.cpu()].to(ranks.device)
            (out * weight).sum().backward()
            if step:
                copies |= {
                    f"{name}: {c}"
                    for c in fake.CROSSINGS
                    if c.waits and c.num_elements > FEW and not any(file in c.line for file in ALLOWED)
                }
        pairs = [(out, whole.output[ids.cpu()])]
        for field, tensor in inputs.items():
            own = (graph.node_ids if field in GRAPH.node else graph.edge_ids).cpu()
            pairs.append((torch.zeros_like(tensor) if tensor.grad is None else tensor.grad, whole.inputs[field][own]))
        for parameter, tensor in mine.named_parameters():
            grad = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
            pairs.append((grad, whole.parameters[parameter]))
        errors[name] = max(float((a.detach().cpu() - b).abs().max()) for a, b in pairs if b.numel())
    return errors, sorted(copies)


class Model(nn.Module):
    """Norms, dropout, a readout and two kinds of layers."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.first, self.second = SAGEConv(6, 8), GATConv(8, 3)
        self.norm, self.dropout = nn.BatchNorm1d(8), dropout

    def forward(self, x: torch.Tensor, edges: Any) -> torch.Tensor:
        """Classes of nodes."""
        h = torch.relu(self.norm(self.first(x, edges)))
        return self.second(nn.functional.dropout(h, self.dropout, self.training), edges)


def train(ranks: Ranks, dropout: float, store: str, folder: str) -> dict[str, Any]:
    """What two epochs, a checkpoint, metrics, an inference and a loader give."""
    graph = sp.load(store, ranks)
    torch.manual_seed(1)
    model = sp.pyg.wrap(Model(dropout).double().to(ranks.device), ranks)
    sp.sync_parameters(model, ranks)
    optimizer = torch.optim.Adam(model.parameters())
    losses = []
    for _ in range(2):
        loss = sp.cross_entropy(model(graph.x, graph), graph.y, graph.train_mask, ranks)
        optimizer.zero_grad()
        loss.backward()
        sp.sync_gradients(model, ranks)
        sp.clip_grad_norm(model, 1.0, ranks)
        optimizer.step()
        losses.append(float(loss.detach()))
    sp.save_checkpoint(f"{folder}/checkpoint", ranks, model, optimizer)
    sp.load_checkpoint(f"{folder}/checkpoint", ranks, model, optimizer)
    model.eval()
    with torch.no_grad():
        out = model(graph.x, graph)
    scores = (
        sp.accuracy(out, graph.y, None, ranks),
        sp.f1(out, graph.y, None, ranks),
        sp.roc_auc(out[:, 0], graph.y == 0, None, ranks),
    )
    sp.infer(model, graph, f"{folder}/out.npy")
    loader = sp.pyg.NeighborLoader(graph, [3, 2], graph.train_mask, batch_size=4)
    batches = [[float(batch.x.sum()), batch.edge_index.size(1)] for batch in loader]
    everything = sp.gather(graph, out)
    rows = sp.rows(graph, out, torch.tensor([3, 1, 4], device=ranks.device))
    return {
        "losses": losses,
        "scores": scores,
        "inferred": torch.from_numpy(np.load(f"{folder}/out.npy")),
        "batches": batches,
        "gathered": None if everything is None else everything.cpu(),
        "rows": rows.cpu(),
    }


def train_on_both(comm: Any, kind: str, store: str, folder: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The same on the CPU and on the device."""
    dropout = 0.3 if kind == fake.NAME else 0.0  # a GPU draws other numbers
    ranks = on_the_device(kind)  # before the first backward, which starts a thread for each device
    return train(comm, dropout, store, f"{folder}/cpu"), train(ranks, dropout, store, f"{folder}/device")
