"""Aggregations that see whole neighbourhoods, so that each rank's share gives what the whole graph does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.nn.aggr import Aggregation, QuantileAggregation
from torch_geometric.nn.conv import MessagePassing


@contextmanager
def whole_neighbourhoods(conv: MessagePassing, max_degree: int | None) -> Iterator[None]:
    """Within, the aggregations of `conv` pad neighbourhoods to `max_degree`, the largest of the graph.

    An LSTM's last output depends on it. None: nothing is changed.
    """
    with ExitStack() as stack:
        for module in conv.modules() if max_degree is not None else ():
            if isinstance(module, Aggregation):
                stack.enter_context(_replaced(module, "to_dense_batch", _padded(module.to_dense_batch, max_degree)))
            if isinstance(module, QuantileAggregation):
                stack.enter_context(_replaced(module, "forward", _with_first_message(module.forward)))
        yield


@contextmanager
def _replaced(module: nn.Module, name: str, method: Callable[..., Any]) -> Iterator[None]:
    before = vars(module).get(name)
    setattr(module, name, method)
    try:
        yield
    finally:
        if before is None:
            delattr(module, name)
        else:
            setattr(module, name, before)


def _padded(to_dense_batch: Callable[..., Any], most: int | None) -> Callable[..., Any]:
    def padded(*args: Any, max_num_elements: int | None = None, **kwargs: Any) -> Any:
        return to_dense_batch(*args, max_num_elements=most if max_num_elements is None else max_num_elements, **kwargs)

    return padded


def _with_first_message(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A quantile with one more destination in front, which has a message: PyG fails if the first one has none."""

    def quantile(
        x: Tensor, index: Tensor, ptr: Tensor | None = None, dim_size: int | None = None, dim: int = -2
    ) -> Tensor:
        zero = torch.zeros_like(x.narrow(dim, 0, 1))
        index = torch.cat([index.new_zeros(1), index + 1])
        out = forward(torch.cat([zero, x], dim), index, None, None if dim_size is None else dim_size + 1, dim)
        return out.narrow(dim, 1, out.size(dim) - 1)

    return quantile
