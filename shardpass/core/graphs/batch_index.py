"""What stands for ``batch`` on a sharded graph: an integer tensor ``[num_own]`` that knows of the other ranks.

It holds the graph of each own node: zeros, or numbers that were stored when several graphs were partitioned as one. The
nodes of a graph lie on any rank. So scattering node rows onto ``batch`` is a reduction over the nodes of all ranks
(`readout.py`), and indexing a table with a row per graph gives every own node its row. These two are enough for
readouts, for softmax over all nodes, and for norms that take a ``batch``. Everything else would depend on which rank
owns which node, and is refused by name.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardpass.core.following import is_called_by, user_line
from shardpass.core.graphs.edge_index import SourceRows
from shardpass.core.graphs.given import as_given
from shardpass.core.graphs.readout import Groups, Reduction, reduce_rows
from shardpass.core.graphs.stand_in import PRINTS, StandIn, describes
from shardpass.core.ranks import Ranks, torch_private
from shardpass.errors import RefusedError

_SAME_ROWS = frozenset(
    "clone contiguous detach to long cpu cuda alias view expand expand_as unsqueeze reshape squeeze".split()
)
_SCATTERS = frozenset(
    "scatter_add scatter_add_ scatter_reduce scatter_reduce_ index_add index_add_ index_reduce index_reduce_".split()
)
_EXTREMA: dict[str, Reduction] = {"amax": "max", "amin": "min"}


class BatchIndex(StandIn):
    """``batch`` of a sharded graph: the graph of each own node."""

    reduces = True
    comm: Ranks
    num_nodes: int  # own nodes: the size of one dimension, which the others repeat
    num_graphs: int  # of all ranks

    @staticmethod
    def of(num_nodes: int, comm: Ranks) -> Any:
        """The stand-in for `num_nodes` own nodes, ``[num_nodes]`` int64 on the device of `comm`."""
        return BatchIndex.wrap(torch.zeros(num_nodes, dtype=torch.int64, device=comm.device), num_nodes, comm)

    @staticmethod
    def wrap(ids: Tensor, num_nodes: int, comm: Ranks, num_graphs: int = 1) -> Any:
        """`ids`, int64, as the graph of `num_nodes` own nodes."""
        out = ids.as_subclass(BatchIndex)
        out.num_nodes, out.comm, out.num_graphs = num_nodes, comm, num_graphs
        return out

    @property
    def plain(self) -> Tensor:
        """The numbers, as an ordinary tensor."""
        return self.as_subclass(Tensor)

    def reduced(self, rows: Tensor, op: Reduction, dim: int = 0, base: float | None = None) -> Tensor:
        """`rows` of all ranks reduced by graph, ``[num_graphs, ...]`` for ``[num_nodes, ...]``. Collective.

        Args:
            dim: the dimension in which this index counts nodes, if it has several.
        """
        if self.num_graphs == 1:
            return reduce_rows(rows, op, self.comm, base).unsqueeze(0)
        ids = self.plain.movedim(dim, 0)
        while ids.dim() > 1:  # repeated along these
            ids = ids.select(1, 0)
        return reduce_rows(rows, op, self.comm, base, Groups(ids, self.num_graphs))

    @classmethod
    def answer(cls, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        mine: Any = next((t for t in (*args, *kwargs.values()) if isinstance(t, BatchIndex)), None)
        if not isinstance(mine, BatchIndex):  # it is in a list of tensors, as for cat
            if name not in ("cat", "concat"):
                raise _refused(name)
            return _joined(name, *args, **kwargs)
        first: Any = args[0] if args else kwargs.get("input")
        with mine.comm.unfollowed(keeps=False):
            out = cls._answer(mine, name, first, func, args, kwargs)
        if type(out) is Tensor and (name in _SCATTERS or name == "bincount"):
            mine.comm.mark_plain(out)  # its rows are graphs, which all ranks have
        elif type(out) is Tensor:
            mine.comm.forget_rows(out)
            return as_given(out, mine.comm) if out.dim() else out
        return out

    @staticmethod
    def _answer(
        mine: BatchIndex, name: str, first: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if name in _SCATTERS and first is not mine:
            return _scatter(mine, name, *args, **kwargs)
        if name == "bincount" and first is mine:
            return _bincount(mine, *args[1:], **kwargs)
        with torch_private.DisableTorchFunctionSubclass():
            if name in ("__getitem__", "index_select", "gather") and first is not mine:
                return _look_up(name, *args, **kwargs)
            if name == "embedding" and first is mine:
                return _look_up("__getitem__", args[1], mine)
            if name in PRINTS:
                return func(mine.plain, *args[1:], **kwargs)
            if name in ("numel", "nelement"):  # this is how PyG asks whether there is any node: some rank has one
                return max(1, func(mine.plain))
            if describes(func):
                return func(*args, **kwargs)
            if first is mine:
                return _asked(mine, name, func, args, kwargs)
        raise _refused(name)


def _asked(mine: BatchIndex, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of a function of `mine` that does not depend on the nodes of other ranks."""
    plain = (mine.plain, *args[1:])
    if name in _SAME_ROWS:
        out = func(*plain, **kwargs)
        return BatchIndex.wrap(out, mine.num_nodes, mine.comm, mine.num_graphs) if out.dtype == torch.int64 else out
    if name in ("max", "amax") and len(args) == 1 and not kwargs:
        return mine.plain.new_tensor(mine.num_graphs - 1)
    if name in ("min", "amin") and len(args) == 1 and not kwargs and mine.num_graphs == 1:
        return mine.plain.new_zeros(())
    if name in ("eq", "ne", "__eq__", "__ne__") and isinstance(args[1], int):
        return func(*plain)
    if name == "one_hot":
        classes = (*args[1:], *kwargs.values(), -1)[0]
        return func(mine.plain, mine.num_graphs if classes == -1 else classes)
    key = args[-1]
    if name == "__getitem__" and all(
        k is None or k in (slice(None), ...) for k in (key if type(key) is tuple else [key])
    ):
        return BatchIndex.wrap(func(*plain), mine.num_nodes, mine.comm, mine.num_graphs)  # ``batch[:, None]``
    by_rows = name in ("__getitem__", "index_select") and isinstance(key, Tensor) and not isinstance(key, BatchIndex)
    if by_rows and mine.dim() == 1:  # some of the own nodes, or sources of edges, on any rank: all of one graph
        if isinstance(key, SourceRows):
            chosen = SourceRows.answer(func, name, plain, kwargs)
        else:
            chosen = func(*plain, **kwargs)
        return BatchIndex.wrap(chosen, chosen.size(0), mine.comm, mine.num_graphs)
    raise _refused(name)


def _scatter(
    mine: BatchIndex, name: str, input: Tensor, dim: int, index: Any, src: Any = None, reduce: str | None = None,
    *, source: Any = None, include_self: bool = True,
) -> Tensor:  # fmt: skip
    """`src` of all ranks reduced into the rows of graphs that `input` has along `dim`. Collective, differentiable."""
    src = source if src is None else src
    if index is not mine or not isinstance(src, Tensor) or isinstance(src, BatchIndex):
        raise _refused(name)
    if input.size(dim) != mine.num_graphs:
        raise RefusedError(
            f"`{name}` of node rows onto {input.size(dim)} graphs: this sharded graph has {mine.num_graphs}, so "
            f"batch_size (dim_size, size) must be {mine.num_graphs} or left out"
        )
    across = index.dim() > 1 and index.numel() > 0 and index.size(dim) > 1 and index.stride(dim) == 0
    if across or src.size(dim) != mine.num_nodes:
        raise RefusedError(
            f"`{name}` along dimension {dim} of {list(src.shape)} by the batch of a sharded graph: expected one row "
            f"for each of the {mine.num_nodes} own nodes"
        )
    rows = src.movedim(dim, 0)
    if reduce is None:
        total = input + mine.reduced(rows, "sum", dim).movedim(0, dim)
    elif reduce in ("prod", "mul") and include_self:
        total = input.clone() * mine.reduced(rows, "prod", dim).movedim(0, dim)
    elif reduce in _EXTREMA and not include_self and not bool(input.detach().any()):
        total = mine.reduced(rows, _EXTREMA[reduce], dim, base=0.0).movedim(0, dim)
    else:
        raise _refused(f"{name}(reduce={reduce!r}, include_self={include_self})")
    return input.copy_(total) if name.endswith("_") else total


def _bincount(mine: BatchIndex, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """The nodes of each graph: those of all ranks, then zeros up to `minlength`."""
    if weights is not None or mine.dim() != 1:
        raise _refused("bincount")
    count = mine.reduced(torch.ones_like(mine.plain), "sum")
    return torch.cat([count, count.new_zeros(max(0, minlength - len(count)))])


def _look_up(name: str, input: Any, *rest: Any, dim: int = 0, index: Any = None) -> Tensor:
    """Rows of a table with one row per graph, one for each own node; or entries of them."""
    dim = rest[0] if name != "__getitem__" and rest else dim
    index = rest[-1] if rest else index
    if isinstance(input, Tensor) and isinstance(index, BatchIndex) and _has_graphs(input, dim, index):
        if name == "gather":
            return input.gather(dim, index.plain)
        return input.index_select(dim, index.plain.view(-1)) if index.dim() == 1 else input[index.plain]
    if is_called_by("torch_geometric.utils._to_dense_batch"):
        raise _refused("to_dense_batch")
    found = f"a tensor of shape {list(input.shape)}" if isinstance(input, Tensor) else type(input).__name__
    raise RefusedError(
        f"{user_line()}: {found} is indexed by the batch of a sharded graph: expected a row for each graph. "
        f"Several indices at once are not supported"
    )


def _has_graphs(table: Tensor, dim: int, index: BatchIndex) -> bool:
    """Whether a table has a row for each graph, as a readout has, and perhaps some more, as an embedding may have."""
    size = table.size(dim) if table.dim() else 0
    holds_nodes = index.comm.row_dim(table) == dim if index.comm.is_followed else size == index.num_nodes
    return size == index.num_graphs or (size > index.num_graphs and not holds_nodes)


def _joined(name: str, tensors: Any = (), dim: int = 0, **_: Any) -> Any:
    """The graph of each own node several times over, as for several views of the nodes."""
    vectors = all(isinstance(one, BatchIndex) and one.dim() == 1 for one in tensors)
    if dim not in (0, -1) or not vectors:
        raise _refused(name)
    first: Any = tensors[0]
    ids = torch.cat([one.plain for one in tensors])
    return BatchIndex.wrap(ids, ids.numel(), first.comm, first.num_graphs)


def _refused(name: str) -> RefusedError:
    return RefusedError(
        f"{user_line()}: `{name}` on the batch of a sharded graph needs all nodes in one place, but they are on "
        f"several ranks. Sums, means, maxima, minima, products and softmax over `batch` work, and graph.num_graphs is "
        f"the number of graphs; for anything else, collect the rows of all ranks with shardpass.gather"
    )
