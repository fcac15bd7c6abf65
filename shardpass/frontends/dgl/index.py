"""A real DGL graph index of this rank's edges, so that unmodified code can run DGL's kernels on them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NoReturn

from torch import Tensor

from shardpass.core.exchange import HaloPlan
from shardpass.frontends.dgl.closed import refused
from shardpass.frontends.dgl.private import HeteroGraphIndex, local_index


class LocalIndex(HeteroGraphIndex):
    """The index of the edges into own nodes, in the rank's edge order.

    [Note: edge softmax needs no communication]
    All in-edges of a node are here. So ``dgl.nn.functional.edge_softmax``, and kernels that read destinations and edges
    only (``copy_e``, ``e_op_v``), give what they give on the whole graph. A kernel that reads source nodes would not.
    The index therefore has a number of source nodes that no node tensor of this rank has, so that such a kernel raises.
    Functions that walk along out-edges raise too, since the index has no format for that.
    """

    has_own_rows = True
    """What `core.following` asks of the index that a kernel of DGL's is given."""

    @staticmethod
    def of(src_rows: Tensor, dst_rows: Tensor, plan: HaloPlan) -> LocalIndex:
        """The index of edges in own-first numbering."""
        num_src = max(plan.num_src, plan.num_own_src, plan.num_dst) + 1
        index = local_index(src_rows, dst_rows, num_src, plan.num_dst)
        index.__class__ = LocalIndex
        return index  # type: ignore[no-any-return]

    def reverse(self) -> NoReturn:
        """Refused."""
        raise refused(
            "the reversed graph (dgl.reverse, edge_softmax with norm_by='src')",
            "reverse it before partitioning, or put the scores into messages; EdgeWeightNorm works in a wrapped model",
        )

    def edge_subgraph(self, induced_edges: Any, preserve_nodes: bool) -> Any:
        """The index of some of the edges among the same nodes, for the softmax over these edges only."""
        if not preserve_nodes:
            raise refused("dgl.edge_subgraph", "do it before partitioning")
        graph = super().edge_subgraph(induced_edges, True).graph  # which is another object whenever it is asked for
        graph.__class__ = LocalIndex
        return SimpleNamespace(graph=graph)

    def _no(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise refused("the structure of the graph", "do what needs it before partitioning")

    edges = adjacency_matrix = adjacency_matrix_tensors = node_subgraph = copy_to = _no
    out_edges = in_edges = find_edges = edge_id = edge_ids = successors = predecessors = _no
    has_edges_between = has_edge_between = line_graph = in_subgraph = out_subgraph = get_unitgraph = _no
