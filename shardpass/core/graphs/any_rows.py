"""`rows`: the rows of any nodes, by their ids in the whole graph."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardpass.core.exchange import Routed, WalkId, carry, exchange_arrays, exchange_rows, node_set
from shardpass.core.graphs.as_data import graph_of
from shardpass.core.graphs.directory import directory_of
from shardpass.core.graphs.graph import ShardedGraph
from shardpass.core.graphs.stand_in import StandIn
from shardpass.core.ranks import Ranks, describe, fail_together, takes_followed
from shardpass.core.sharding import NodeType


@takes_followed()
def rows(graph: ShardedGraph, h: Tensor, ids: Tensor, node_type: NodeType | None = None) -> Tensor:
    """The rows of `h` that belong to some nodes of the whole graph, ``[len(ids), ...]``. Collective, in backward too.

    It takes the place of ``h[ids]`` in a script for one process. The ids are those of the graph as it was partitioned,
    which ``graph.node_ids`` gives for own nodes. Every rank may ask for other nodes and for any number of them, also
    for none. In backward the gradients return to the owners of the rows and are added up there. A row is sent once to
    each rank that asks for it, however often it asks, and must fit the memory of that rank.

    Args:
        graph: this rank's share, or what stands for it inside a wrapped model.
        h: a row for each own node, ``[num_own, ...]``; trailing shape and dtype are the same on every rank.
        ids: ``[n]``, integers in ``[0, total_nodes)``, in any order and with repetitions.
        node_type: of the nodes; needed where the graph has several types.

    Raises:
        ValueError: on every rank, if one rank gives ids out of range or of another dtype or shape, or `h` with another
            number of rows; or a node type that is missing or unknown.
        DivergenceError: ranks pass rows of different trailing shapes or dtypes.
        RefusedError: a wrapped model is running, and `ids` are numbers of own rows, or are computed from several rows.
    """
    graph = graph_of(graph)
    comm, (own_ids, total) = graph.comm, graph.ids_of(node_type)
    kind = graph.node_types[0] if node_type is None else node_type
    label = "rows by id" if node_type is None else f"rows of {kind!r} nodes by id"
    with comm.unfollowed():
        fail_together(comm, label, lambda: _check(h, ids, own_ids.numel(), total), ValueError)
    comm.require_rows(h, node_set(kind, own_ids.numel()))
    of = comm.set_of_ids(ids)
    with comm.unfollowed():
        asked, place = np.unique(ids.detach().cpu().numpy().astype(np.int64), return_inverse=True)
        route = Routed.of(directory_of(graph, kind).global_ids(asked), graph.ownership[kind])
        requests = exchange_arrays(comm, [[part] for part in route.split(route.rows)], label)
        held = [torch.from_numpy(part).to(comm.device) for (part,) in requests]
        wanted = [torch.from_numpy(part).to(comm.device) for part in route.split(route.order)]
        wire = graph.options.wire_dtype

        def there(own: Tensor, walk: WalkId) -> Tensor:
            return _moved(comm, own, held, wanted, len(asked), wire, walk.label)

        def back(grad: Tensor, walk: WalkId) -> Tensor:
            return _moved(comm, grad, wanted, held, own_ids.numel(), wire, walk.label)

        found = carry(comm, h, label, there, back).index_select(0, torch.from_numpy(place).to(comm.device))
    comm.mark_rows(found, of)
    return found


def _check(h: Any, ids: Any, num_own: int, total: int) -> None:
    if not isinstance(h, Tensor) or h.dim() == 0 or h.size(0) != num_own:
        raise ValueError(f"rows: h has one row per own node, [{num_own}, ...], found {describe(h)}")
    if not isinstance(ids, Tensor) or ids.dim() != 1 or ids.dtype.is_floating_point or ids.dtype.is_complex:
        raise ValueError(f"rows: ids are a vector of integers, [n], found {describe(ids)}")
    if isinstance(ids, StandIn):
        raise ValueError(f"rows: ids are a plain tensor of node ids, found a {type(ids).__name__}")
    if ids.dtype == torch.bool:
        raise ValueError("rows: ids is a mask, and expected are node ids; own rows are picked by h[mask]")
    bad = ids[(ids < 0) | (ids >= total)]
    if len(bad):
        raise ValueError(f"rows: there is no node {int(bad[0])}; node ids of the whole graph are in [0, {total})")


def _moved(
    comm: Ranks, source: Tensor, take: list[Tensor], put: list[Tensor], size: int, wire: torch.dtype | None, label: str
) -> Tensor:
    """Rows ``take[r]`` of `source` go to rank r, and those of rank r are added to rows ``put[r]`` of what is returned.

    A fetch and the return of its gradients differ in that `take` and `put` change places.
    """
    found = exchange_rows(comm, [{"": source}], [[part] for part in take], [[len(part)] for part in put], wire, label)
    out = source.new_zeros((size, *source.shape[1:]))
    for places, (group,) in zip(put, found):
        out.index_add_(0, places, group[""])
    return out
