"""What DGLGraph has and a sharded graph does not offer: each such member raises an error that says what to do."""

from __future__ import annotations

import traceback
from typing import Any

from dgl import DGLError, DGLGraph
from torch import nn

from shardpass.core.following import user_line
from shardpass.errors import RefusedError


class ClosedMemberError(RefusedError, DGLError, AttributeError):
    """A sharded graph does not offer a member of DGLGraph. It is an AttributeError, so that ``hasattr`` is right."""


_ADVICE = (
    (
        "change the graph before partitioning it",
        "add_edges add_nodes add_self_loop remove_edges remove_nodes remove_self_loop reorder_graph reverse to_simple "
        "line_graph subgraph edge_subgraph node_subgraph in_subgraph out_subgraph khop_in_subgraph khop_out_subgraph "
        "edge_type_subgraph node_type_subgraph set_batch_num_nodes set_batch_num_edges",
    ),
    (
        "ids are numbered per rank; graph.ndata[dgl.NID] and graph.edata[dgl.EID] hold the original ones. Walk along "
        "edges, or explain a model, in one process that has the whole graph",
        "all_edges edge_ids find_edges has_edges_between has_nodes in_edges out_edges predecessors successors "
        "filter_nodes filter_edges",
    ),
    (
        "sample with shardpass.dgl.DataLoader, or in one process",
        "sample_etype_neighbors sample_labors sample_neighbors sample_neighbors_biased sample_neighbors_fused "
        "select_topk global_uniform_negative_sampling get_node_storage get_edge_storage is_pinned",
    ),
    ("read the fields themselves: graph.ndata and graph.edata", "node_attr_schemes edge_attr_schemes"),
    ("use get_ntype_id, or the names of types", "get_ntype_id_from_src get_ntype_id_from_dst"),
    (
        "it needs the structure of the whole graph; compute it before partitioning and store it as a field",
        "adj adj_external adj_tensors adjacency_matrix inc incidence_matrix is_multigraph to_networkx to_cugraph "
        "is_unibipartite",
    ),
    ("use update_all or apply_edges", "prop_edges prop_nodes pull push send_and_recv"),
    ("it belongs to its process", "shared_memory pin_memory_ unpin_memory_ record_stream"),
    ("set every row of the field instead", "set_n_initializer set_e_initializer"),
    ("ids are int64, and formats are the engine's own", "astype formats"),
    (
        "it walks over the nodes of the whole graph one after the other: do that in one process that has it",
        "prop_nodes_topo prop_nodes_bfs prop_edges_dfs topological_nodes_generator bfs_nodes_generator "
        "bfs_edges_generator dfs_edges_generator dfs_labeled_edges_generator",
    ),
    (
        "make it before you partition, and store its edges as an edge type of their own",
        "metapath_reachable_graph khop_graph to_bidirected add_reverse_edges",
    ),
    (
        "a sharded graph is one graph: graph.num_edges() counts this rank's edges, and shardpass.all_reduce_sum adds "
        "up what each rank computes of them",
        "batch_num_edges",
    ),
)


def advice_for(name: str, otherwise: str = "use another member") -> str:
    """What to do instead of using a member of DGLGraph, or a function of DGL."""
    return next((advice for advice, names in _ADVICE if name in names.split()), otherwise)


def called_function() -> str | None:
    """The function or the layer of DGL that the user's code has called and that runs now; `None` if none does."""
    found = None
    for frame, _ in traceback.walk_stack(None):
        module = frame.f_globals.get("__name__", "")
        if module.startswith("dgl."):
            layer = frame.f_locals.get("self")
            found = type(layer).__name__ if isinstance(layer, nn.Module) else frame.f_code.co_name
        elif found is not None or not module.startswith(("shardpass.", "torch.", "contextlib", "functools")):
            break
    return found


def refused(what: str, advice: str, error: BaseException | None = None) -> ClosedMemberError:
    """The error for something that a sharded graph does not offer. It names the line that runs, or raised `error`.

    Args:
        what: it. A function of DGL that asks for it is named too, and has an advice of its own.
        advice: what to do instead.
        error: what was raised, if it was not here.
    """
    function = called_function()
    if function is not None:
        what, advice = f"{what} (read by `{function}` of DGL)", advice_for(function, advice)
    return ClosedMemberError(
        f"{user_line(error)}: {what} is not available on a sharded graph, of which this rank holds only the in-edges "
        f"of its own nodes: {advice}"
    )


class Closed(DGLGraph):
    """A DGLGraph by its type only. A public member that a subclass does not define is refused by name."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return object.__new__(cls)

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("__") and _is_inherited(type(self), name):
            raise refused(f"DGLGraph.{name}", advice_for(name))
        try:
            return super().__getattribute__(name)
        except ClosedMemberError:
            raise
        except AttributeError:
            if name.startswith("__") or not name.startswith("_"):
                raise
            raise refused("the structure that functions of DGL read", "call them before partitioning") from None

    def int(self) -> Any:
        """The graph itself, whose ids are int64 whatever is asked for."""
        return self

    def cpu(self) -> Any:
        """The graph itself, if it is there."""
        return self.to("cpu")

    def __reduce__(self) -> Any:
        raise TypeError("a sharded graph belongs to its process: save the store's path and load it again")


def _is_inherited(kind: type, name: str) -> bool:
    """Whether `name` is found in DGLGraph before any class of ours."""
    for base in kind.__mro__:
        if name in base.__dict__:
            return base is DGLGraph
    return False
