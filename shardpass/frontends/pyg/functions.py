"""What to do in place of functions of torch_geometric.utils that a sharded graph refuses inside a model.

Nothing is refused here. A function runs until one of its operations is, and that names the operation, of which its user
knows nothing. The words below say why the whole function cannot be exact, and what to do.
"""

from __future__ import annotations

import traceback
from typing import Any

from shardpass.core.following import user_line
from shardpass.errors import RefusedError

_BY_IDS = "it sorts, compares or makes up ids of nodes, which every rank numbers anew; apply it before you partition"
_ORDER = (
    "every rank has edges of its own, in an order of its own, on which layers do not depend; leave it out, or sort "
    "before you partition"
)
_ONE_ANSWER = (
    "it gives one answer for the whole graph, of which this rank has a part; compute it before you partition and give "
    "it to the model"
)
_MATRIX = (
    "no rank has the whole matrix; multiply by it by message passing, as torch_geometric.nn.SimpleConv('sum')(x, "
    "edge_index, edge_weight)"
)
_OTHER_LIBRARY = "it gives the graph to another library, and this rank has a part of it; do that before you partition"
_NEGATIVES = "it draws pairs among all nodes; shardpass.negative_sampling(graph) draws them outside the model"
_SETS = "it parts rows by graph, whose nodes may be on several ranks; use a readout over graph.batch"
_ALL_ROWS = "it takes rows of all nodes or edges together; compute it before you partition and store it as a field"
_GROUPS = (
    ("coalesce to_undirected add_random_edge remove_isolated_nodes k_hop_subgraph dropout_path get_ppr", _BY_IDS),
    ("sort_edge_index lexsort index_sort group_argsort", _ORDER),
    (
        "is_undirected contains_self_loops contains_isolated_nodes homophily assortativity "
        "structured_negative_sampling_feasible",
        _ONE_ANSWER,
    ),
    (
        "to_dense_adj to_torch_coo_tensor to_torch_csr_tensor to_torch_csc_tensor to_torch_sparse_tensor spmm",
        _MATRIX,
    ),
    ("to_scipy_sparse_matrix to_networkx to_networkit to_cugraph to_dgl", _OTHER_LIBRARY),
    ("negative_sampling batched_negative_sampling structured_negative_sampling", _NEGATIVES),
    ("unbatch unbatch_edge_index to_dense_batch to_nested_tensor", _SETS),
    ("shuffle_node segment", _ALL_ROWS),
    ("trim_to_layer", "it belongs to sampled neighbours, but a sharded graph is trained whole; leave it out"),
)
INSTEAD: dict[str, str] = {name: reason for names, reason in _GROUPS for name in names.split()}
"""Functions that are never exact, with the reason and what to do."""

UNLESS: dict[str, tuple[str, Any, str]] = {
    **{
        name: (count, None, f"without `{count}` it counts up to the largest id of this rank; pass {count}=x.size(0)")
        for name, count in {
            "degree": "num_nodes", "normalized_cut": "num_nodes", "get_self_loop_attr": "num_nodes",
            "scatter": "dim_size", "index_to_mask": "size",
        }.items()
    },
    "dropout_edge": ("force_undirected", True, f"with force_undirected=True {_BY_IDS}"),
    "dropout_adj": ("force_undirected", True, f"with force_undirected=True {_BY_IDS}"),
    "dropout_node": ("relabel_nodes", True, f"with relabel_nodes=True {_BY_IDS}"),
    "subgraph": ("relabel_nodes", True, f"with relabel_nodes=True {_BY_IDS}"),
    "bipartite_subgraph": ("relabel_nodes", True, f"with relabel_nodes=True {_BY_IDS}"),
}  # fmt: skip
"""Functions that are not exact if an argument has a value, with the reason and what to do."""
_WRAPPERS = ("torch_geometric.experimental", "torch_geometric.deprecation")


def explained(error: RefusedError) -> RefusedError:
    """`error`, or if a function of torch_geometric.utils that the user calls has caused it, one about that."""
    called_by = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module, name = frame.f_globals.get("__name__", ""), frame.f_code.co_name
        if module.startswith("torch_geometric.utils.") and not called_by.startswith("torch_geometric."):
            argument, value, reason = UNLESS.get(name, ("", "", ""))
            if name in INSTEAD or (argument in frame.f_locals and frame.f_locals[argument] is value):
                return RefusedError(
                    f"{user_line(error)}: torch_geometric.utils.{name} cannot be exact in a model on a sharded graph: "
                    f"{INSTEAD.get(name, reason)}"
                )
        called_by = called_by if module in _WRAPPERS else module
    return error
