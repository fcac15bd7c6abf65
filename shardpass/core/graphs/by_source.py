"""What row 0 of an ``edge_index`` does to tensors: it takes rows of any rank's nodes, and adds rows at their owners."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from shardpass.core.exchange import HaloPlan, extremum_at_owners, halo_fetch, scatter_to_owners
from shardpass.core.following import user_line
from shardpass.core.graphs.layer_flow import LayerFlow
from shardpass.core.graphs.stand_in import StandIn
from shardpass.core.ranks import FetchedUnwrapped, RowSet
from shardpass.errors import RefusedError

TAKING = frozenset(["__getitem__", "index_select", "gather", "embedding"])
"""Functions that take rows of a tensor by their numbers."""


def refused(name: str, what: str) -> RefusedError:
    """An error for a function that would depend on how a rank numbers its rows."""
    if name == "__set__":
        return RefusedError(
            f"changing an attribute of {what} of a sharded graph is refused. If this came from torch.utils.checkpoint, "
            f"reentrant checkpointing is not supported: pass use_reentrant=False"
        )
    if name == "_is_view":  # the first thing that the tracer of torch.compile asks
        return RefusedError(
            f"{user_line()}: torch.compile cannot read code that is given {what} of a sharded graph. Compile the "
            f"model, and not what calls it"
        )
    if "sparse" in name:
        return RefusedError(
            f"{user_line()}: a sparse matrix is made of {what} of a sharded graph, but a rank has no rows of the whole "
            f"matrix. Multiply by it by message passing, in PyG SimpleConv('sum')(x, edge_index, edge_weight)"
        )
    return RefusedError(
        f"{user_line()}: `{name}` on {what} of a sharded graph: ids are numbered per rank, so the result would "
        f"differ from that of the whole graph. Compute it before partitioning and store it as a node or edge field"
    )


def take_by_source(
    plan: HaloPlan, flow: LayerFlow | None, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    """What a function in `TAKING` takes from a tensor of own rows, by numbers of sources. Collective, differentiable.

    Args:
        flow: of the edge list that the numbers are of.
    """
    table, dim, key, others = _bound(name, args, kwargs)
    keys = key if isinstance(key, tuple) else (key,)
    given = [index for index in keys if isinstance(index, StandIn)]
    if not isinstance(table, Tensor) or isinstance(table, StandIn) or len(given) != 1:
        raise refused(f"{name} with several of them" if given else name, "source node ids")
    index, numbers = given[0], given[0].plain
    at = next((at for at in range(numbers.dim()) if numbers.stride(at) and numbers.size(at) != 1), 0)
    at = 1 if numbers.dim() and index.counts_last else at  # which dimension of the index counts edges
    dim = (_dim_of(index, keys, table.dim()) if dim is None else dim) % table.dim()
    if others or (name == "gather" and (at != dim or any(numbers.stride(i) for i in _wide(numbers) if i != at))):
        raise refused(f"{name} with {[*others]}" if others else name, "source node ids")
    if table.size(dim) != plan.num_own_src:
        raise RefusedError(
            f"{user_line()}: a tensor with {table.size(dim)} rows is indexed by source node; expected "
            f"{plan.num_own_src} rows (the own nodes of rank {plan.comm.rank} of a sharded graph)"
        )
    if flow is not None:
        flow.note_indexing(plan.comm, table)
    if plan.comm.forward is None:
        plan.comm.caches.of(FetchedUnwrapped).has_happened = True
    sources, edges = RowSet("source nodes", plan.num_src, ("sources", ref(plan))), plan.edge_set(numbers.size(at))
    own = table.movedim(dim, 0)
    plan.comm.require_rows(own, plan.source_set)
    with plan.comm.unfollowed():
        rows = halo_fetch(own, plan, "halo fetch").movedim(0, dim)
        numbers = numbers.to(table.device).view_as(numbers)  # edges that are streamed are in CPU memory
        plan.comm.mark_rows(rows, sources, dim)
        plan.comm.mark_rows(numbers, edges, at, points_to=sources)
    if name == "gather":
        out = rows.gather(dim, numbers)
    elif key is index and numbers.dim() == 1:
        out = rows.index_select(dim, numbers)
    else:
        out = rows[tuple(numbers if one is index else one for one in keys)]
    if not plan.comm.runs_user_code and edges.count in out.shape:  # nobody has followed it
        plan.comm.mark_rows(out, edges, [*out.shape].index(edges.count))
    return out


def _bound(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, int | None, Any, dict[str, Any]]:
    """The table, the dimension, the index, and what else is given to a function in `TAKING`."""
    if name == "__getitem__":
        return args[0], None, args[1], {}
    names = ("index", "table") if name == "embedding" else ("table", "dim", "index")
    renamed = {"input": "index", "weight": "table"} if name == "embedding" else {"input": "table"}
    bound = dict(zip(names, args)) | {renamed.get(key, key): value for key, value in kwargs.items()}
    dim = 0 if name == "embedding" else bound.pop("dim")
    others = {key: value for key, value in bound.items() if key not in names and value not in (None, False)}
    others.pop("norm_type", None)
    return bound["table"], dim, bound["index"], others


def _wide(numbers: Tensor) -> list[int]:
    return [dim for dim, size in enumerate(numbers.shape) if size != 1]


def _dim_of(index: Tensor, keys: tuple[Any, ...], dims: int) -> int:
    """Which dimension of a table with `dims` dimensions `index` takes rows of, as one of `keys`."""
    takes = [one.dim() if isinstance(one, Tensor) and one.dtype == torch.bool else int(one is not None) for one in keys]
    ellipsis = next((at for at, one in enumerate(keys) if one is Ellipsis), None)
    if ellipsis is not None:
        takes[ellipsis] = dims - (sum(takes) - 1)
    return sum(takes[: next(at for at, one in enumerate(keys) if one is index)])


def put_at_source(plan: HaloPlan, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """What a scatter by numbers of sources returns. Collective."""
    if name in ("scatter_add", "scatter_add_"):
        return scatter_to_source(plan, name, args, kwargs)
    if name in ("scatter_reduce", "scatter_reduce_"):
        return extremum_at_source(plan, name, *args, **kwargs)
    raise refused(name, "source node ids")


def add_at_source(name: str, base: Tensor, dim: int, index: Tensor, source: Tensor, alpha: float = 1) -> Tensor:
    """``index_add`` by numbers of sources: a scatter of whole rows."""
    shape = [1] * source.dim()
    shape[dim] = -1
    scatter = getattr(base, name.replace("index", "scatter"))
    added: Tensor = scatter(dim, index.view(shape).expand_as(source), source if alpha == 1 else source * alpha)
    return added


def scatter_to_source(plan: HaloPlan, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """`source` added to a tensor of own rows at the owners of sources. Collective, differentiable."""
    bound = {**dict(zip(("input", "dim", "index", "src"), args)), **kwargs}
    base, source, index = bound["input"], bound["src"], bound["index"]
    if any(isinstance(t, StandIn) for t in (base, source)) or not isinstance(source, Tensor):
        raise refused(name, "source node ids")
    index = index.plain.to(source.device)
    dim = bound["dim"] % source.dim()
    if base.size(dim) != plan.num_own_src:
        raise RefusedError(
            f"scattering onto {base.size(dim)} source nodes; expected the {plan.num_own_src} own nodes of rank "
            f"{plan.comm.rank}"
        )
    shape = [*source.shape]
    shape[dim] = plan.num_src
    partial = source.new_zeros(shape).scatter_add(dim, index, source)
    total = base + scatter_to_owners(partial.movedim(dim, 0), plan, "scatter to owners").movedim(0, dim)
    return base.copy_(total) if name.endswith("_") else total


def fill_at_source(plan: HaloPlan, base: Tensor, index: Any, number: float) -> None:
    """Write a number into the rows where edges of any rank begin, as ``mask[source] = True`` does. Collective."""
    if not isinstance(index, StandIn) or base.dim() != 1 or base.size(0) != plan.num_own_src:
        raise refused("__setitem__", "source node ids")
    ones = index.plain.new_ones(index.numel(), dtype=torch.get_default_dtype())
    given = (ones.new_zeros(plan.num_own_src), 0, index.flatten(), ones)
    base[scatter_to_source(plan, "scatter_add", given, {}) > 0] = number
    plan.comm.forget_rows(base)
    plan.comm.mark_rows(base, plan.source_set)


def extremum_at_source(
    plan: HaloPlan, name: str, base: Tensor, dim: int, index: Any, src: Any, reduce: str = "", *,
    include_self: bool = True,
) -> Tensor:  # fmt: skip
    """The largest or smallest of `src` for each own source node, as a softmax over sources takes it. No gradient."""
    is_known = isinstance(index, StandIn) and reduce in ("amax", "amin") and not include_self
    if not is_known or not src.is_floating_point() or type(base) is not Tensor:
        raise refused(f"{name}(reduce={reduce!r}, include_self={include_self})", "source node ids")
    if torch.is_grad_enabled() and src.requires_grad:
        raise RefusedError(
            f"{user_line()}: `{name}` with a gradient onto source nodes of a sharded graph: only their sums are "
            f"differentiable. Detach the values (a softmax does), or take the {reduce} of in-edges, on reversed edges"
        )
    dim, numbers, shape = dim % src.dim(), index.plain, [*src.shape]
    shape[dim] = plan.num_src
    worst = float("-inf" if reduce == "amax" else "inf")
    found = src.new_full(shape, worst).scatter_reduce(dim, numbers, src, reduce)
    seen = src.new_zeros(shape).scatter(dim, numbers, 1.0)
    out, has = (
        extremum_at_owners(rows.movedim(dim, 0), plan, op, "extremum at owners").movedim(0, dim)
        for rows, op in ((found, reduce), (seen, "amax"))
    )
    total = torch.where(has > 0, out, base)
    return base.copy_(total) if name.endswith("_") else total


def picks(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[Any]:
    """By what a function takes edges of a list, its first argument."""
    if name == "__getitem__":
        return args[1][1:] if isinstance(args[1], tuple) else ()
    bound = {**dict(zip(("input", "dim", "index"), args)), **kwargs}
    return [bound["index"]] if name == "index_select" and bound["dim"] in (1, -1) else ()


def flips_rows(*dims: Any) -> bool:
    """Whether ``torch.flip`` along these dimensions puts sources in the place of destinations."""
    return dims in ((0,), (-2,), ((0,),), ([0],), ((-2,),), ([-2],))


def refuse_loops_between(plan: HaloPlan) -> None:
    """Refuse to find or to add self-loops where edges end at nodes of another type than they begin at."""
    if plan.joins_types:
        raise RefusedError(
            f"{user_line()}: self-loops among edges from {plan.source_set.name} to {plan.dst_set.name} would join "
            f"nodes of the same number, which are numbered anew on every rank. Set add_self_loops=False"
        )
