"""What we use of PyG beyond its documented interface, in one place.

`tests/frontends/test_pyg_private.py` says which of these a release of PyG no longer has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch_geometric.nn.conv import MessagePassing

MESSAGE_PASSING = frozenset(
    "inspector special_args explain decomposed_layers node_dim flow aggr_module _user_args _edge_user_args "
    "_message_forward_pre_hooks _message_forward_hooks _propagate_forward_pre_hooks _propagate_forward_hooks "
    "_aggregate_forward_pre_hooks _aggregate_forward_hooks _edge_update_forward_pre_hooks "
    "_edge_update_forward_hooks".split()
)
"""Attributes of a `torch_geometric.nn.MessagePassing` layer."""

INSPECTOR = frozenset("collect_param_data get_flat_param_names get_param_dict implements".split())
"""Methods of its `inspector`."""

CACHES = ("_cached_edge_index", "_cached_adj_t", "_cached_x", "_cached_h")
"""Where layers with ``cached=True`` keep a graph."""

_NORM = "eps weight bias"
ATTRIBUTES: dict[str, str] = {
    "Sequential": "_caller_module",
    "GraphNorm": f"{_NORM} mean_scale",
    "InstanceNorm": f"{_NORM} momentum track_running_stats running_mean running_var",
    "LayerNorm": f"{_NORM} mode",
    "PairNorm": "eps scale scale_individually",
    "BatchNorm": "module allow_single_element",
    "HeteroBatchNorm": f"{_NORM} momentum track_running_stats running_mean running_var num_types affine "
    "num_batches_tracked",
    "GPSConv": "attn",
    "HGTConv": "edge_types edge_types_map",
    "RGCNConv": "num_relations num_bases num_blocks out_channels weight comp root bias",
    "GATConv": "lin att_src att_dst heads out_channels negative_slope dropout bias",
    "PerformerAttention": "heads head_channels q k v fast_attn attn_out dropout",
    "PerformerProjection": "projection_matrix kernel",
    "SGFormerAttention": "heads head_channels q k v",
    "PolynormerAttention": "heads head_channels q k v qk_shared lns h_lins beta lin_out dropout",
    "AttentiveFP": "lin1 gate_conv gru atom_convs atom_grus mol_conv mol_gru num_timesteps dropout lin2",
    "CorrectAndSmooth": "autoscale prop1",
    "VGAE": "__mu__ __logstd__",
    "ARGA": "discriminator",
    "GroupAddRev": "disable",
    "DeepGCNLayer": "ckpt_grad",
}
"""Attributes of the instances of other classes, by class. Those of a `VGAE` exist after `encode`."""

METHODS: dict[str, frozenset[str]] = {
    "torch_geometric.nn.aggr:Aggregation": frozenset(["to_dense_batch"]),
    "torch_geometric.nn.aggr:QuantileAggregation": frozenset(["forward"]),
    "torch_geometric.nn.conv:ChebConv": frozenset(["__norm__"]),
    "torch_geometric.nn.conv:HGTConv": frozenset(["forward"]),
    "torch_geometric.nn.conv:HANConv": frozenset(["forward"]),
}
"""Methods that are replaced or called, by ``module:class``."""

FUNCTIONS: dict[str, str] = {
    "torch_geometric.nn.conv.gcn_conv": "gcn_norm",
    "torch_geometric.typing": "WITH_SEGMM",
    "torch_geometric.nn.attention.performer": "generalized_kernel PerformerProjection",
    "torch_geometric.nn.models.sgformer": "SGModule",
    "torch_geometric.nn.models.autoencoder": "EPS MAX_LOGSTD",
    "torch_geometric.nn.to_hetero_with_bases_transformer": "get_node_offset_dict group_edge_placeholder",
}
"""Names of modules that PyG does not document."""

GLOBALS: dict[str, frozenset[str]] = {
    "torch_geometric.nn.conv:HGTConv.forward": frozenset(["construct_bipartite_edge_index"]),
    "torch_geometric.nn.conv:HANConv.forward": frozenset(["group"]),
    "torch_geometric.nn.conv:GPSConv.forward": frozenset(["to_dense_batch"]),
    "torch_geometric.nn.models.sgformer:SGModule.forward": frozenset(["to_dense_batch"]),
    "torch_geometric.nn.models:Polynormer.forward": frozenset(["to_dense_batch"]),
}
"""Global names that a method uses and that `with_names` gives another meaning, by ``module:class.method``."""


def with_hooks(conv: MessagePassing, step: str, given: tuple[Any, ...], run: Callable[..., Any]) -> Any:
    """What ``run(*given)`` returns, between the hooks of `conv` for that step, called as PyG calls them."""
    for hook in getattr(conv, f"_{step}_forward_pre_hooks").values():
        changed = hook(conv, given)
        if changed is not None:
            given = changed if isinstance(changed, tuple) else (changed,)
    out = run(*given)
    for hook in getattr(conv, f"_{step}_forward_hooks").values():
        changed = hook(conv, given, out)
        out = out if changed is None else changed
    return out
