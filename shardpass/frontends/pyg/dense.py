"""Aggregations that need whole neighbourhoods, so that each rank's share gives what the whole graph gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.nn.aggr import Aggregation, QuantileAggregation
from torch_geometric.nn.conv import MessagePassing


@contextmanager
def holding(module: nn.Module, values: Mapping[str, Any]) -> Iterator[None]:
    """Within, `module` has these attributes; afterwards what it had under these names before."""
    before = {name: vars(module)[name] for name in values if name in vars(module)}
    vars(module).update(values)
    try:
        yield
    finally:
        for name in values:
            del vars(module)[name]
        vars(module).update(before)


@contextmanager
def whole_neighbourhoods(conv: MessagePassing, max_degree: int | None) -> Iterator[None]:
    """Within, the aggregations of `conv` pad neighbourhoods to `max_degree`, the largest of the graph.

    The last output of an LSTM depends on that length. With `None` nothing changes.
    """
    if max_degree is None:
        yield
        return
    with ExitStack() as stack:
        for module in conv.modules():
            if isinstance(module, Aggregation):
                padded = partial(_padded, module.to_dense_batch, max_degree)
                stack.enter_context(holding(module, {"to_dense_batch": padded}))
            if isinstance(module, QuantileAggregation):
                stack.enter_context(holding(module, {"forward": partial(_quantile, module.forward)}))
        yield


def _padded(
    to_dense_batch: Callable[..., Any], max_degree: int, *args: Any, max_num_elements: int | None = None, **kwargs: Any
) -> Any:
    most = max_degree if max_num_elements is None else max_num_elements
    return to_dense_batch(*args, max_num_elements=most, **kwargs)


def _quantile(
    forward: Callable[..., Tensor], x: Tensor, index: Tensor, ptr: Tensor | None = None, dim_size: int | None = None,
    dim: int = -2,
) -> Tensor:  # fmt: skip
    """A quantile with one more destination in front, which has a message: PyG fails if the first one has none."""
    zero = torch.zeros_like(x.narrow(dim, 0, 1))
    index = torch.cat([index.new_zeros(1), index + 1])
    out = forward(torch.cat([zero, x], dim), index, None, None if dim_size is None else dim_size + 1, dim)
    return out.narrow(dim, 1, out.size(dim) - 1)
