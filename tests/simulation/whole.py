"""What programs give on the whole graph in one process, in plain torch and PyG: the truth behind the references."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from .programs import CHANNELS, Program, attend, model_of, slope_of


def on_whole_graph(program: Program) -> dict[str, Tensor]:
    """What the program gives, with a row for each node in ``"out"``."""
    return _called(program) if program.kind == "call" else _trained(program)


def _called(program: Program) -> dict[str, Tensor]:
    graph = program.whole()
    weight = torch.eye(CHANNELS, dtype=torch.float64, requires_grad=True)
    x = graph.node["x"].clone().requires_grad_()
    out = x @ weight
    src, dst = graph.edge_index
    edges: Any = SimpleNamespace(index=dst, num_dst=graph.num_nodes)
    for kind in program.layers:
        rows = out[src] * torch.tanh(out[dst])
        zeros = torch.zeros_like(out)
        if kind in ("sum", "softmax"):
            out = out + zeros.index_add(0, dst, attend(rows, edges) if kind == "softmax" else rows)
        else:
            out = out + zeros.scatter_reduce(0, dst.view(-1, 1).expand_as(rows), rows, kind, include_self=False)
    loss = (out**2).mean()
    if program.has_forces:
        loss = loss + (slope_of(out, x) ** 2).mean()
    loss.backward()
    return {"out": out.detach(), "loss": loss.detach(), "gradient": weight.grad}


def _trained(program: Program) -> dict[str, Tensor]:
    graph, model = program.whole(), model_of(program, lambda: None)
    if program.kind == "infer":
        return {"out": model(graph.node["x"], graph.edge_index).detach()}
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    found: dict[str, Tensor] = {}
    for step in range(2):
        x = graph.node["x"].clone().requires_grad_(program.has_forces)
        out = model(x, graph.edge_index)
        loss = ((out - 1) ** 2).mean()
        if program.has_forces:
            loss = loss + (slope_of(out, x) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found |= {f"loss {step}": loss.detach(), "out": out.detach()}
    return found | {name: value.detach() for name, value in model.named_parameters()}
