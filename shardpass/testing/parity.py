"""Parity: a layer on the whole graph in one process against the same layer on a sharded graph."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shardpass.core.ranks import Options, Ranks
from shardpass.testing.graphs import WholeGraph, shard_in_memory
from shardpass.testing.run import run

Caller = Callable[[nn.Module, dict[str, Tensor], Any], Tensor]


@dataclass
class Outcome:
    """What one evaluation gave: output, gradients of inputs and parameters, buffers afterwards."""

    output: Tensor
    inputs: dict[str, Tensor] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)


def cotangent(like: Tensor) -> Tensor:
    """A fixed random cotangent in the shape of `like`."""
    generator = torch.Generator().manual_seed(7)
    return torch.randn(like.shape, generator=generator, dtype=torch.float64).to(like.dtype)


def evaluate_whole(model: nn.Module, graph: WholeGraph, call: Caller) -> Outcome:
    """`model` on the whole graph, forward and backward, in this process."""
    model = copy.deepcopy(model)
    inputs = _leaves({**graph.node, **graph.edge})
    output = call(model, inputs, graph.edge_index)
    (output * cotangent(output)).sum().backward()
    return Outcome(
        output.detach(),
        {name: gradient_of(t) for name, t in inputs.items() if t.requires_grad},
        {name: gradient_of(p) for name, p in model.named_parameters()},
        {name: b.clone() for name, b in model.named_buffers()},
    )


def evaluate_sharded(
    model: nn.Module,
    graph: WholeGraph,
    call: Caller,
    owners: Tensor,
    ranks: int,
    wrap: Callable[[nn.Module, Ranks], nn.Module],
    options: Options,
    whole: Outcome,
) -> Outcome:
    """`model` on `ranks` in-process ranks: rows put back in the original order, parameter gradients summed."""
    cotangents = cotangent(whole.output)

    def work(comm: Ranks) -> tuple[Any, ...]:
        mine = wrap(copy.deepcopy(model), comm)
        sharded = shard_in_memory(graph, owners, comm, options)
        inputs = _leaves({**dict(sharded.node), **dict(sharded.edge)})
        output = call(mine, inputs, sharded)
        rows = sharded.node_ids if output.size(0) == sharded.num_nodes else sharded.edge_ids
        (output * cotangents[rows]).sum().backward()
        grads = {name: gradient_of(t) for name, t in inputs.items() if t.requires_grad}
        parameters = {name: gradient_of(p) for name, p in mine.named_parameters()}
        buffers = {name: b.clone() for name, b in mine.named_buffers()}
        return output.detach(), rows, sharded.node_ids, sharded.edge_ids, grads, parameters, buffers

    results = run(work, ranks)
    out = Outcome(torch.full_like(whole.output, float("nan")))
    out.inputs = {name: torch.full_like(g, float("nan")) for name, g in whole.inputs.items()}
    out.buffers = results[0][6]
    for output, rows, node_ids, edge_ids, grads, parameters, _ in results:
        out.output[rows] = output
        for name, grad in grads.items():
            out.inputs[name][node_ids if name in graph.node else edge_ids] = grad
        for name, grad in parameters.items():
            out.parameters[name] = out.parameters[name] + grad if name in out.parameters else grad
    return out


def differences(whole: Outcome, sharded: Outcome) -> dict[str, float]:
    """The largest absolute error of every tensor of `sharded` against `whole`; NaN counts as infinite."""
    pairs = {"output": (whole.output, sharded.output)}
    for kind in ("inputs", "parameters", "buffers"):
        mine, theirs = getattr(whole, kind), getattr(sharded, kind)
        pairs |= {f"{kind}.{name}": (mine[name], theirs[name]) for name in mine}
    return {name: _error(a, b) for name, (a, b) in pairs.items()}


def _error(a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape:
        return float("inf")
    error = float((a.detach().double() - b.detach().double()).abs().max()) if a.numel() else 0.0
    return error if error == error else float("inf")


def _leaves(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n: t.detach().clone().requires_grad_(t.is_floating_point()) for n, t in tensors.items()}


def gradient_of(tensor: Tensor) -> Tensor:
    """A copy of the gradient of `tensor`; zeros if it has none."""
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad.clone()
