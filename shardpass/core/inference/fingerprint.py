"""Text that changes when the results of a run may change: what `infer` compares before it continues a run."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from shardpass.core.graphs import ShardedEdgeIndex, ShardedGraph
from shardpass.core.ranks import tensor_digest, torch_private

_PLAIN = bool | int | float | complex | str | bytes | None | torch.dtype | torch.device


def model_lines(model: nn.Module) -> Iterator[str]:
    """The printed model, and a line for each parameter, buffer, extra state, and plain or tensor attribute of a module.

    Code is not looked at.
    """
    yield str(model)
    for name, value in {**dict(model.named_buffers()), **model.state_dict()}.items():
        yield f"{name} {_value_line(value) or value!r}"
    of_every_module = vars(nn.Module())  # the training flag, parameters, hooks
    for prefix, module in model.named_modules():
        yield f"{prefix} {type(module).__module__}.{type(module).__qualname__}"
        for key, value in sorted(vars(module).items()):
            line = _value_line(value)
            if key not in of_every_module and line is not None:
                yield f"{prefix}.{key} {line}"


def argument_lines(args: Any, graph: ShardedGraph) -> Iterator[str]:
    """A line for each argument. The line of one that cannot be compared is different in every run."""
    for index, value in enumerate(torch_private.tree_leaves(args)):
        if value is graph or any(value is relation.edge_index for relation in graph.relations.values()):
            line = "of the graph"
        elif isinstance(value, ShardedEdgeIndex) and value.flow is None:
            line = tensor_line(value.plain)
        else:
            line = _value_line(value) or uuid.uuid4().hex
        yield f"argument {index} {line}"


def tensor_line(value: Tensor) -> str:
    """The dtype, the shape and a hash of the content."""
    return f"{value.dtype} {list(value.shape)} {tensor_digest(value)}"


def _value_line(value: Any) -> str | None:
    """The content of a tensor, or of numbers and strings in lists and dicts; `None` for anything else."""
    if type(value) in (Tensor, nn.Parameter):
        return tensor_line(value) if value.layout == torch.strided else None
    return repr(value) if all(isinstance(leaf, _PLAIN) for leaf in torch_private.tree_leaves(value)) else None
