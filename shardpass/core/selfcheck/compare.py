"""What the self-check compares: a run of a model on a whole graph with runs on pieces of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardpass.core.selfcheck.small import SmallCall

_TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-3}
_SKIP = "wrap(model, comm, check=False) leaves the check out"


@dataclass
class Trial:
    """What one run gave: outputs, gradients of inputs and parameters, buffers, the outputs of all submodules by name.

    `ids`: the rows of every node and edge type it had; `tables`: the parameters that have rows of nodes.
    """

    outputs: list[Tensor]
    inputs: list[Tensor]
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    modules: dict[str, list[Tensor]]
    ids: dict[Any, Tensor]
    tables: set[str]


def kind_of(tensor: Tensor, counts: dict[Any, int]) -> Any:
    """The node or edge type that a tensor of the whole graph has a row for each of; None where there is none."""
    if tensor.dim() == 0:
        return None
    return next((kind for kind, count in counts.items() if count == tensor.size(0)), None)


def difference(name: str, whole: Trial, ranks: list[Trial], small: SmallCall) -> str:
    """In words, or nothing."""
    errors = {
        f"output {i}": _error(out, [r.outputs[i] for r in ranks], ranks, small.counts)
        for i, out in enumerate(whole.outputs)
        if all(type(r.outputs[i]) is Tensor for r in ranks)  # not an edge_index, whose numbers are each rank's own
    }
    for i, (grad, kind) in enumerate(zip(whole.inputs, small.input_kinds)):
        errors[f"gradient of an input ({kind})"] = _error(grad, [r.inputs[i] for r in ranks], ranks, small.counts)
    for key, grad in whole.parameters.items():
        parts, counts = [r.parameters[key] for r in ranks], small.counts
        if key not in whole.tables:
            parts, counts = [torch.stack(parts).sum(0)], {}
        errors[f"gradient of {key}"] = _error(grad, parts, ranks, counts)
    for key, buffer in whole.buffers.items():
        errors[f"buffer {key}"] = _error(buffer, [r.buffers[key] for r in ranks if key in r.buffers], ranks, {})
    wrong = [key for key, error in errors.items() if error > 1]
    if not wrong:
        return ""
    where = _first_module(whole, ranks, small.counts)
    return (
        f"self-check: on a small random graph {name} gives another {wrong[0]} in pieces than whole, so it would be "
        f"wrong on a sharded graph. {where} Something there combines several nodes or edges outside message passing (a "
        f"mean, norm or softmax over all nodes, for example). Move it into message passing, use a layer that is exact "
        f"(see the list of layers), or compute it over all ranks with shardpass.all_reduce_sum; {_SKIP}"
    )


def _first_module(whole: Trial, ranks: list[Trial], counts: dict[Any, int]) -> str:
    for name, tensors in whole.modules.items():
        if any(len(r.modules.get(name, ())) != len(tensors) for r in ranks):
            continue  # it runs in pieces
        for i, tensor in enumerate(tensors):
            if _error(tensor, [r.modules[name][i] for r in ranks], ranks, counts) > 1:
                return f"The first part whose output differs is {name!r}."
    return "All its parts agree: it is in forward() itself, or in backward."


def _error(whole: Tensor, parts: list[Tensor], ranks: list[Trial], counts: dict[Any, int]) -> float:
    """The largest difference in units of what is tolerated; 0 where nothing can be compared."""
    whole, parts = whole.detach(), [part.detach() for part in parts]
    kind = kind_of(whole, counts)
    if kind is not None and all(len(p) == len(r.ids[kind]) for p, r in zip(parts, ranks) if p.dim()):
        joined = torch.empty_like(whole)
        for part, rank in zip(parts, ranks):
            if part.shape[1:] != whole.shape[1:]:
                return float("inf")
            joined[rank.ids[kind]] = part.to(whole.dtype)
        parts = [joined]
    elif any(part.shape[1:] != whole.shape[1:] or part.dim() != whole.dim() for part in parts):
        return float("inf")
    elif any(part.shape != whole.shape for part in parts):  # rows selected or in another order
        if sum(len(part) for part in parts) != len(whole):
            return float("inf")
        whole, parts = _sorted(whole), [_sorted(torch.cat(parts))]
    return max([0.0, *(_distance(whole, part) for part in parts)])


def _sorted(rows: Tensor) -> Tensor:
    """Rows in an order that depends on their values only."""
    flat = rows.double().nan_to_num().reshape(len(rows), -1)
    weights = torch.rand(flat.size(1), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return rows[torch.argsort(flat @ weights)]


def _distance(expected: Tensor, found: Tensor) -> float:
    """The largest difference in units of what is tolerated. Infinite values must be so in both, integers be equal."""
    if not (expected.is_floating_point() or expected.is_complex()):
        return 0.0 if torch.equal(expected, found) else float("inf")
    finite = expected.isfinite()
    if not torch.equal(finite, found.isfinite()):
        return float("inf")
    left, right = expected[finite], found[finite].to(expected.dtype)
    if not left.numel():
        return 0.0
    bound = _TOLERANCE.get(expected.dtype, 1e-3) * (1 + float(left.abs().max()))
    return float((left - right).abs().max()) / bound
