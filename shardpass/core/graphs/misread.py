"""What code reads of the graph that `load` returned that it does not have, and what to write instead."""

from __future__ import annotations

from shardpass.core.following import is_called_by
from shardpass.errors import RefusedError

_AMBIGUOUS = {"num_nodes": "nodes", "num_edges": "edges", "num_nodes_dict": "nodes", "num_edges_dict": "edges"}
_OF_DGL = frozenset(
    "adj_external apply_edges apply_nodes canonical_etypes dstdata edata etypes idtype in_degrees is_block local_scope "
    "local_var multi_update_all ndata ntypes number_of_dst_nodes number_of_edges number_of_nodes out_degrees "
    "srcdata to_canonical_etype update_all".split()
)

NOT_WRAPPED = (
    "a ShardedGraph is given to code that expects edge_index. The model takes it once it is wrapped: "
    "model = shardpass.pyg.wrap(model, comm); other functions take graph.edge_index"
)


def refuse_ambiguous(name: str) -> None:
    """Raise if `name` is a count that means the whole graph in PyG, where a rank has one of its own too."""
    if name in _AMBIGUOUS:
        what = _AMBIGUOUS[name]
        of = "graph[type]" if name.endswith("_dict") else "graph"
        raise RefusedError(
            f"`{name}` of a sharded graph could mean two numbers: {of}.num_own_{what} counts this rank's {what}, and "
            f"{of}.total_{what} those of the whole graph. A model that is to run on plain PyG too can read a size from "
            f"a tensor, as in x.size(0)"
        )


def refuse_of_dgl(name: str) -> None:
    """Raise if `name` is an attribute of a DGLGraph."""
    if name not in _OF_DGL:
        return
    if is_called_by("dgl.transforms"):
        raise AttributeError(
            "a transform of DGL is given the graph that shardpass.load or shard returned, of which this rank holds "
            "a part: apply it to the whole graph before it is cut"
        )
    raise AttributeError(
        f"`.{name}` of a DGLGraph is read of the graph that shardpass.load or shard returned: call a model that "
        f"shardpass.dgl.wrap(model, comm) has wrapped, or pass shardpass.dgl.graph(graph) to code of your own"
    )
