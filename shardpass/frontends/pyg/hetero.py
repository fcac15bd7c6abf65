"""PyG's layers and models over several node types. Their own code runs, with some of its helpers exchanged for ours.

`HeteroConv` and `to_hetero` need nothing: they call an ordinary layer for each edge type. Three others reach across
types or ranks outside message passing: HGT and `to_hetero_with_bases` put the nodes of all types into one tensor and
shift ids to match, and HAN takes a mean over all nodes of a type.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.nn import to_hetero_with_bases_transformer as bases
from torch_geometric.nn.conv import HANConv, HGTConv

from shardpass.core.graphs import Piece, ShardedEdgeIndex, reversed_edges, union
from shardpass.core.ranks import Ranks, agree, all_reduce_sum, digest, diverged
from shardpass.core.sharding import EdgeType, NodeType
from shardpass.core.wrapping import with_names
from shardpass.errors import RefusedError


def adapt_hetero(model: nn.Module, comm: Ranks) -> None:
    """Make the parts of `model` that reach across node types right on a sharded graph. In place.

    Raises:
        RefusedError: a class derived from one of these layers has its own forward.
    """
    for name, module in model.named_modules():
        title = f"{type(module).__name__} ({name})" if name else type(module).__name__
        if isinstance(module, HGTConv):
            module.forward = partial(_hgt, _known(module, HGTConv, title), title)
        elif isinstance(module, HANConv):
            module.forward = partial(_han, _known(module, HANConv, title), title, comm)
        elif isinstance(module, torch.fx.GraphModule):
            _exchange_in_graph(module)


def _known(module: Any, kind: type[nn.Module], title: str) -> Any:
    if type(module).forward is not kind.forward:
        raise RefusedError(
            f"{title} cannot be exact on a sharded graph: its forward is not that of PyG's {kind.__name__}, which "
            f"reaches across node types outside message passing. Use that class, or HeteroConv"
        )
    return module


def is_sharded(edge_index_dict: Any) -> bool:
    """Whether a dict holds edges of a sharded graph."""
    return isinstance(edge_index_dict, Mapping) and any(
        isinstance(value, ShardedEdgeIndex) for value in edge_index_dict.values()
    )


def holds_arguments(value: Any) -> bool:
    """Whether a dict holds arguments by their names, as ``{"positions": pos, "edge_index": graph}`` does, and no types.

    It has edges of a sharded graph under a name that is no edge type, beside other tensors.
    """
    if not isinstance(value, Mapping):
        return False
    others = [one for one in value.values() if not (isinstance(one, ShardedEdgeIndex) or is_sharded(one))]
    has_names = all(isinstance(name, str) for name in value)
    return has_names and len(others) < len(value) and not all(map(_is_edge_list, others))


def _is_edge_list(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.int64 and value.dim() == 2 and value.size(0) == 2


def check_types(values: Sequence[Any], comm: Ranks) -> None:
    """Raise if the arguments of a model do not fit together by type. Collective if they hold sharded edges by type.

    Dicts that are among named arguments are looked at as if they had been passed by themselves.

    Raises:
        RefusedError, ValueError: see `check_edges_by_type`.
        DivergenceError: ranks pass different types, or pass them in a different order.
    """
    named = [one for value in values if holds_arguments(value) for one in value.values()]
    by_type = [value for value in (*values, *named) if isinstance(value, Mapping) and not holds_arguments(value)]
    if not any(is_sharded(value) for value in by_type):
        return
    for value in by_type:
        check_edges_by_type(value)
    text = "arguments of the types " + "; ".join(str(list(value)) for value in by_type)
    answers = agree(comm, "types of the arguments", [digest(text)])
    if any(answer != answers[0] for answer in answers):
        raise diverged(comm, "types of the arguments", text)


def check_edges_by_type(edge_index_dict: Any) -> None:
    """Raise if edges of a sharded graph are under the wrong type, or beside ordinary ones.

    Raises:
        RefusedError: some of the edges are ordinary tensors, whose ids mean nothing on a sharded graph.
        ValueError: the types of the nodes at the ends are not those of the key.
    """
    if not is_sharded(edge_index_dict):
        return
    for kind, value in edge_index_dict.items():
        if not isinstance(value, ShardedEdgeIndex):
            raise RefusedError(
                f"the edges of {kind} are {type(value).__name__}, while others are of a sharded graph: take them all "
                f"from graph.edge_index_dict"
            )
        ends = value.plan.ends
        if ends is None or not (isinstance(kind, tuple) and len(kind) == 3):
            continue
        ends = (ends[1], ends[0]) if value.is_reversed else ends
        if (kind[0], kind[2]) != ends:
            raise ValueError(f"the edges under {kind} go from {ends[0]!r} to {ends[1]!r}; expected edges of that type")


def _union(
    edges: Mapping[EdgeType, ShardedEdgeIndex], src_start: Mapping[EdgeType, int], dst_start: Mapping[NodeType, int],
    rows: Mapping[NodeType, int], sizes: tuple[int, int], title: str,
) -> ShardedEdgeIndex:  # fmt: skip
    """The edges of the types in `src_start` as one list. Collective.

    Args:
        src_start, dst_start: where the rows of an edge type's sources, and of a node type, begin in the tensor of all.
        rows: own rows of each node type.
        sizes: rows of the source and of the destination tensor of all types.
    """
    for kind in src_start:
        ends = (kind[2], kind[0]) if edges[kind].is_reversed else (kind[0], kind[2])
        for end, expected in zip(ends, (edges[kind].plan.num_own_src, edges[kind].plan.num_dst)):
            if rows[end] != expected:
                raise ValueError(
                    f"{title} on rank {edges[kind].plan.comm.rank}: the tensor of {end!r} has {rows[end]} rows; the "
                    f"edges {kind} need {expected} (the own nodes)"
                )
    pieces = [Piece(edges[kind], start, dst_start[kind[2]]) for kind, start in src_start.items()]
    return union(pieces, *sizes, title)


def _hgt(conv: HGTConv, title: str, x_dict: dict[NodeType, Tensor], edge_index_dict: dict[EdgeType, Any]) -> Any:
    """`HGTConv.forward`, in which a union of relations takes the place of node ids that are shifted by type."""
    original = type(conv).forward
    if not is_sharded(edge_index_dict):
        return original(conv, x_dict, edge_index_dict)
    check_edges_by_type(edge_index_dict)
    unknown = [kind for kind in edge_index_dict if kind not in conv.edge_types_map]
    if unknown:
        raise ValueError(f"{title}: {unknown} are not edge types of this layer: {conv.edge_types}")
    rows = {kind: x.size(0) for kind, x in x_dict.items()}

    def construct(
        edges: dict[EdgeType, Any], src_start: dict[EdgeType, int], dst_start: dict[NodeType, int],
        edge_attr_dict: Any, num_nodes: int,
    ) -> tuple[ShardedEdgeIndex, Tensor]:  # fmt: skip
        weights = [edge_attr_dict["__".join(kind)].expand(edges[kind].size(1), -1) for kind in src_start]
        num_dst = sum(rows[kind] for kind in dst_start)
        return _union(edges, src_start, dst_start, rows, (num_nodes, num_dst), title), torch.cat(weights)

    # HGTConv relies on the order of its own edge types
    ordered = {kind: edge_index_dict[kind] for kind in conv.edge_types if kind in edge_index_dict}
    for kind, edges in ordered.items():
        if edges.is_reversed:  # no edge tensors that would have to follow
            ordered[kind] = reversed_edges(edges, title).edge_index
    return with_names(original, construct_bipartite_edge_index=construct)(conv, x_dict, ordered)


def _han(
    conv: HANConv, title: str, comm: Ranks, x_dict: dict[NodeType, Tensor],
    edge_index_dict: dict[EdgeType, Any], *args: Any, **kwargs: Any,
) -> Any:  # fmt: skip
    """`HANConv.forward`, in which the mean over own nodes is one over the nodes of all ranks."""
    forward = type(conv).forward
    if is_sharded(edge_index_dict):
        check_edges_by_type(edge_index_dict)
        forward = with_names(forward, group=partial(_group, title, comm))
    return forward(conv, x_dict, edge_index_dict, *args, **kwargs)


def _group(
    title: str, comm: Ranks, xs: list[Tensor], q: Tensor, k_lin: nn.Module
) -> tuple[Tensor | None, Tensor | None]:
    """What PyG's `group` returns on the whole graph: own rows ``[num_nodes, channels]``, and the same attention."""
    if not xs:
        return None, None
    out = torch.stack(xs)  # [num_edge_types, num_nodes, channels]
    own = torch.tensor([out.size(1)], device=comm.device)
    count = int(comm.all_reduce(own, "sum", f"{title}: number of nodes"))
    if not count:
        return out.view(0, out.size(-1)), None
    scores = torch.tanh(k_lin(out)).sum(1, dtype=torch.promote_types(out.dtype, torch.float32))
    mean = all_reduce_sum(scores, comm, f"{title}: semantic attention") / count
    attention = (q * mean.to(out.dtype)).sum(-1).softmax(dim=0)
    return (attention.view(len(xs), 1, 1) * out).sum(0), attention


class NodeOffsets(dict[NodeType, int]):
    """Where the rows of each node type begin in the tensor of all types; `rows` says how many there are."""

    rows: dict[NodeType, int]


def node_offsets(x_dict: dict[NodeType, Tensor], type2id: dict[NodeType, int]) -> NodeOffsets:
    """PyG's ``get_node_offset_dict``, which leaves out how many rows the last type has."""
    found = NodeOffsets(bases.get_node_offset_dict(x_dict, type2id))
    found.rows = {kind: x_dict[kind].size(-2) for kind in type2id}
    return found


def group_edges(values: dict[EdgeType, Any], type2id: dict[EdgeType, int], offsets: NodeOffsets | None = None) -> Any:
    """PyG's ``group_edge_placeholder``; the edges of a sharded graph become a union of relations. Collective then."""
    if not is_sharded(values) or len(type2id) == 1:
        return bases.group_edge_placeholder(values, type2id, offsets)
    title = "to_hetero_with_bases"
    if offsets is None:
        raise ValueError(f"{title}: a node-level argument must come before edge_index in the forward of the model")
    total = sum(offsets.rows.values())
    return _union(values, {kind: offsets[kind[0]] for kind in type2id}, offsets, offsets.rows, (total, total), title)


def _exchange_in_graph(model: torch.fx.GraphModule) -> None:
    """Exchange the helpers that `to_hetero_with_bases` wrote into a model."""
    ours = {bases.get_node_offset_dict: node_offsets, bases.group_edge_placeholder: group_edges}
    found = [node for node in model.graph.nodes if node.op == "call_function" and node.target in ours]
    for node in found:
        node.target = ours[node.target]
    if found:
        model.recompile()


def has_one_tensor_of_all_types(module: nn.Module) -> bool:
    """Whether `to_hetero_with_bases` made a model, which joins the rows of all types and takes them apart again."""
    nodes = module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ()
    return any(node.op == "call_function" and node.target in (node_offsets, group_edges) for node in nodes)
